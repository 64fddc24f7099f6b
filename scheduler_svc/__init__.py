"""The scheduler: decides what runs next, and owns nothing."""
