"""The benchmarks: each module measures the figures of one `flowrt bench` command."""
