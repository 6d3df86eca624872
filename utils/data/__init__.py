"""From EPRI's zips to training batches. Does not import `utils.distributed`."""
