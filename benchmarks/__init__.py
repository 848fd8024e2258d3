"""Programs that print numbers; README.md says what each measures."""
