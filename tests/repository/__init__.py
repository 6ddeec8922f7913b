"""House rules of the repository, as tests."""
