//! The sockets of the event plane: a ZMTP client, its supervisor and replay.
