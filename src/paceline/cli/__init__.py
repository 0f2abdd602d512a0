"""The command line: `main` and one file a verb. Importing it loads no torch."""
