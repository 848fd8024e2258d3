"""Samples that come from the rows of data sets, without engines: their forms, their tokens on the disk, their order."""
