"""The pure core: sequences, policy, planner, decoding, stopping, and the machine that ties them."""
