"""What is computed: pure torch on explicit inputs. Imports nothing; README.md is the map and holds the legend of shape suffixes."""
