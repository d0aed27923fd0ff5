"""planning: which deployment for which hardware and targets (cost model, strategy search). Pure. Still empty: a later version brings it."""
