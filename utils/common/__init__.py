"""What any script needs: options, errors, files, this machine. Imports no other room."""
