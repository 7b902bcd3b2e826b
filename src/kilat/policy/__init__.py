"""policy: rooms that decide. No torch, no sockets, no clock, no environment; time comes in as an argument."""
