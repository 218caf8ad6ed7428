"""The ``paceline`` command: ``main`` dispatches, one file a command."""
