"""``dflash bench``: speed as a ratio, to a peer in the same run on the same device and to what the device can do."""
