"""From EPRI's zips to a batch. Knows no rank."""
