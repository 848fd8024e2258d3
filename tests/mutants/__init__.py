"""`make mutants`: how many small faults in the central modules do the tests find? See CONTRIBUTING.md."""
