"""Child processes that run programs of users and models for a service; README.md has the parts and their users."""
