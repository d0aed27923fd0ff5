"""Published measurements as data, and how well the cost model predicts them."""
