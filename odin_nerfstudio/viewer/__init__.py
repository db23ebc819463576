"""What a run does, for people to see: in the live viewer, in traces, scalars and a report (design §6)."""
