"""How blocks of memory are laid out through which ranks of one host tell each other something."""

TURN, LAST, FLAG, SLOTS, SLOT_BYTES = 0, 8, 64, 128, 8192
"""Where in it stand the number of the slot whose turn it is, that of the last exchange, the flag,
the two slots; the length of a slot."""
BLOCK_BYTES = SLOTS + 2 * SLOT_BYTES
MINE, OUT, NBYTES, SPINS, PEERS, WORDS = range(6)
"""What the compiled functions are given, an array of words: the address of this rank's block, that
of its message, the bytes of every message, how often to look before giving up for now, how many
peers."""
BLOCK, INTO, CAME, PER_PEER = range(4)
"""Then for each peer: the addresses of its block and of where its message goes, whether it came."""
