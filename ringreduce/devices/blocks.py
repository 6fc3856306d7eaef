"""How a block of memory is laid out through which a rank tells the others of its host something."""

TURN, LAST, FLAG, SLOTS, SLOT_BYTES = 0, 8, 64, 128, 8192
"""Where in it stand the number of the slot whose turn it is, that of the last exchange, the flag,
the two slots; the length of a slot."""
BLOCK_BYTES = SLOTS + 2 * SLOT_BYTES
