"""Options, errors, files, text and facts about this machine. Imports nothing else from `utils`."""
