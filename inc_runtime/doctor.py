"""Placeholder until the doctor lands."""


def add_arguments(parser):
    """Nothing."""


def run(options):
    """Nothing."""
    return 0
