"""The checks that every transport passes."""
