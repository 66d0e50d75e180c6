//! The two streams of a command: results on standard output, everything else on standard error.

use std::io::{ErrorKind, Write};

/// Writes a result, with a line's end; `false` when nobody reads results any more, as after `| head`.
///
/// # Errors
/// In words, when it cannot be written.
pub fn print(text: &str) -> Result<bool, String> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(format!("standard output: {e}")),
    }
}

/// Says something beside the result. Whoever closed standard error does not want to know.
pub fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", text.trim_end());
}
