//! What engines publish.

use kvgate_kv::event::{Event, decode};

/// A batch of KV events, or not: it takes memory in proportion to what came, whatever it claims to hold.
pub fn events(data: &[u8]) {
    let Ok(batch) = decode(data) else { return };
    // every event, block and token took a byte at least
    let (mut things, mut hashes) = (batch.bad_events.len(), 0);
    for event in &batch.events {
        things += 1;
        match event {
            Event::Stored(stored) => {
                hashes += stored.hashes.len();
                things += stored.tokens.as_ref().map_or(0, Vec::len);
                let keys = stored.extra_keys.iter().flat_map(|keys| keys.iter());
                assert!(keys.map(<[u8]>::len).sum::<usize>() <= data.len());
            }
            Event::Removed(removed) => hashes += removed.hashes.len(),
            Event::Cleared => {}
        }
    }
    assert!(things + hashes <= data.len(), "{things} things and {hashes} hashes in {} bytes", data.len());
    // a batch says itself where it ends
    let short = data.get(..data.len() - 1).unwrap_or_default();
    assert!(decode(short).is_err(), "half a batch is one");
}
