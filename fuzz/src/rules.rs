//! What operators write.

use std::path::PathBuf;
use std::sync::LazyLock;

use kvgate::{Gateway, config};

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("kvgate-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("rules")).expect("room for a file");
    folder
});

/// A rule's file, or where the first byte is odd a gateway's: read, or refused with something to say.
pub fn rules(data: &[u8]) {
    let Some((kind, text)) = data.split_first() else { return };
    let (gateway, rule): (&[u8], &[u8]) = match kind % 2 {
        0 => (b"", text),
        _ => (text, b"[[endpoint]]\naddress = \"127.0.0.1:1\"\n"),
    };
    let file = FOLDER.join("gateway.toml");
    std::fs::write(&file, gateway).expect("room for a file");
    std::fs::write(FOLDER.join("rules/rule.toml"), rule).expect("room for a file");
    if let Err(problems) = config::load(&file, Gateway::new().kinds()) {
        assert!(!problems.to_string().is_empty());
    }
}
