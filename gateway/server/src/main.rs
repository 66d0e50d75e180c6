//! The `kvgate` command.
fn main() {}
