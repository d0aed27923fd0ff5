"""dataflow: matching inputs by tag and firing nodes through the compute seam. One runner for model graphs and users' graphs."""
