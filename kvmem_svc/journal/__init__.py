"""The journal: every mutation of the memory core, written before it is answered."""
