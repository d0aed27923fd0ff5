"""The kinds of operators, one file for each or for those that belong together; graph/kinds.py has the contract."""
