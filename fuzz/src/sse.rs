//! What engines stream.

use bytes::Bytes;

use crate::relayed::EventGate;
use crate::stream::Dialect;

/// A stream of events, cut anywhere: the same bytes pass, and only whole events, and the same is understood.
///
/// The first byte chooses the dialect, the second the size of the pieces.
pub fn sse(data: &[u8]) {
    let [kind, size, stream @ ..] = data else { return };
    let paths = ["/v1/completions", "/v1/responses", "/v1/messages", "/other"];
    let dialect = Dialect::of(paths[usize::from(*kind) % paths.len()]);
    let whole = pass(dialect, stream, usize::MAX);
    let pieces = pass(dialect, stream, usize::from(*size).max(1));
    assert_eq!(whole.0, stream);
    assert_eq!(pieces.0, stream);
    // what is let go unfinished depends on the pieces
    if stream.len() < 64 * 1024 {
        assert_eq!(whole.1, pieces.1, "what was told");
    }
}

fn pass(dialect: Dialect, stream: &[u8], size: usize) -> (Vec<u8>, crate::relayed::Told) {
    let (mut gate, mut passed) = (EventGate::new(dialect), Vec::new());
    for piece in stream.chunks(size) {
        let held = passed.len();
        if let Some(ready) = gate.push(Bytes::copy_from_slice(piece)) {
            let whole = [&b"\n\n"[..], b"\n\r\n", b"\r\r"].iter().any(|end| ready.ends_with(end));
            assert!(whole || ready.len() > 64 * 1024, "half an event passes");
            passed.extend_from_slice(&ready);
        }
        assert!(passed.len() >= held);
    }
    passed.extend(gate.rest().into_iter().flatten());
    let farewell = gate.farewell(502, "engine", "engine_error", "it broke");
    assert!(farewell.ends_with(b"\n\n"));
    (passed, gate.told())
}
