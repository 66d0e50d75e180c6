//! The store of tokenizers: what it loads, when, and what it never touches.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use kvgate_prompt::{State, Tokenizers, TokenizersConfig};
use tempfile::TempDir;

fn stage(store: &Path, slug: &str) {
    fs::create_dir_all(store.join(slug)).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let words = kvgate_tests::tokenizers().join("tiny-words");
        fs::copy(words.join(file), store.join(slug).join(file)).unwrap();
    }
}

fn store(folder: &TempDir) -> Tokenizers {
    Tokenizers::new(folder.path(), TokenizersConfig { retry: Duration::ZERO, ..TokenizersConfig::default() })
}

/// The state once nobody loads any more.
fn settled(store: &Tokenizers, model: &str) -> State {
    let start = Instant::now();
    loop {
        match store.get(model) {
            State::Loading if start.elapsed() < Duration::from_secs(60) => {
                std::thread::sleep(Duration::from_millis(1))
            }
            state => return state,
        }
    }
}

fn reason(state: &State) -> &str {
    match state {
        State::Missing(reason) | State::Failed(reason) => reason,
        state => panic!("{state:?}"),
    }
}

#[test]
fn loads_in_the_background() {
    let folder = tempfile::tempdir().unwrap();
    stage(folder.path(), "org__name");
    let store = store(&folder);
    assert!(store.held().is_empty());
    assert!(matches!(store.get("org/name"), State::Loading | State::Ready(_)));
    let State::Ready(model) = settled(&store, "org/name") else { panic!() };
    assert!(!model.encode("hello world", false).unwrap().is_empty());
    // the other spelling of the folder is no name of it
    assert!(matches!(store.get("org__name"), State::Missing(_)));
    assert_eq!(store.held().len(), 1);
}

#[test]
fn many_ask_and_one_loads() {
    let folder = tempfile::tempdir().unwrap();
    stage(folder.path(), "m");
    let store = store(&folder);
    let models: Vec<_> = std::thread::scope(|scope| {
        let load = || match store.load("m") {
            State::Ready(model) => model,
            state => panic!("{state:?}"),
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(load)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(models.iter().all(|model| std::sync::Arc::ptr_eq(model, &models[0])));
}

#[test]
fn unknown_models_leave_no_trace() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder);
    for i in 0..10_000 {
        assert!(matches!(store.get(&format!("org/model-{i}")), State::Missing(_)));
    }
    assert!(store.held().is_empty());
    for name in
        ["", ".", "..", "../store", "a/../b", "/etc/passwd", "%2e%2e", "a\0b", "a__b", &"x".repeat(1 << 20)]
    {
        assert!(matches!(store.load(name), State::Missing(_)), "{name:?}");
    }
    let nowhere = Tokenizers::new("/nonexistent/store", TokenizersConfig::default());
    assert!(matches!(nowhere.get("m"), State::Missing(_)));
}

#[test]
fn links_out_of_the_store_are_not_followed() {
    let outside = tempfile::tempdir().unwrap();
    stage(outside.path(), "m");
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder);
    symlink(outside.path().join("m"), folder.path().join("linked")).unwrap();
    assert!(reason(&store.load("linked")).contains("leads out of the store"));
    symlink("..", folder.path().join("up")).unwrap();
    symlink(".", folder.path().join("self")).unwrap();
    assert!(matches!((store.load("up"), store.load("self")), (State::Missing(_), State::Missing(_))));
    fs::create_dir(folder.path().join("file")).unwrap();
    symlink(outside.path().join("m/tokenizer.json"), folder.path().join("file/tokenizer.json")).unwrap();
    assert!(reason(&store.load("file")).contains("leads out of the store"));
    // inside the store links are fine
    stage(folder.path(), "real");
    symlink("real", folder.path().join("alias")).unwrap();
    assert!(matches!(store.load("alias"), State::Ready(_)));
}

#[test]
fn failures_are_told_and_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("m")).unwrap();
    let store = store(&folder);
    assert!(reason(&store.load("m")).contains("tokenizer.json: missing"));
    fs::write(folder.path().join("m/tokenizer.json"), "{}").unwrap();
    assert!(reason(&store.load("m")).contains("tokenizer.json"));
    stage(folder.path(), "m");
    fs::write(folder.path().join("m/tokenizer_config.json"), "{").unwrap();
    assert!(reason(&store.load("m")).contains("tokenizer_config.json"));
    stage(folder.path(), "m");
    assert!(matches!(store.load("m"), State::Ready(_)));

    let patient = Tokenizers::new(folder.path(), TokenizersConfig::default());
    fs::create_dir(folder.path().join("n")).unwrap();
    assert!(matches!(patient.load("n"), State::Failed(_)));
    stage(folder.path(), "n");
    assert!(matches!(patient.load("n"), State::Failed(_)), "left alone for a while");
}

#[test]
fn the_number_of_models_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let store =
        Tokenizers::new(folder.path(), TokenizersConfig { max_models: 2, ..TokenizersConfig::default() });
    for slug in ["a", "b", "c"] {
        stage(folder.path(), slug);
    }
    assert!(matches!((store.load("a"), store.load("b")), (State::Ready(_), State::Ready(_))));
    assert!(reason(&store.load("c")).contains("2 models"));
    assert_eq!(store.held().len(), 2);
}

#[test]
fn changed_files_are_loaded_beside_the_old_ones() {
    let folder = tempfile::tempdir().unwrap();
    stage(folder.path(), "m");
    let store = store(&folder);
    let State::Ready(old) = store.load("m") else { panic!() };
    assert!(store.refresh().is_empty());

    fs::write(folder.path().join("m/chat_template.jinja"), "new").unwrap();
    assert_eq!(store.refresh(), [("m".to_owned(), Ok(()))]);
    let State::Ready(new) = store.get("m") else { panic!() };
    assert!(!std::sync::Arc::ptr_eq(&old, &new));
    assert!(old.encode("still here", false).is_ok());
    assert!(store.refresh().is_empty());

    // files that cannot be read leave the old model in use, and are reported every time
    fs::write(folder.path().join("m/tokenizer.json"), "broken").unwrap();
    for _ in 0..2 {
        assert!(matches!(&store.refresh()[..], [(name, Err(_))] if name == "m"));
        let State::Ready(kept) = store.get("m") else { panic!() };
        assert!(std::sync::Arc::ptr_eq(&kept, &new));
    }
    fs::remove_dir_all(folder.path().join("m")).unwrap();
    assert!(matches!(&store.refresh()[..], [(name, Err(_))] if name == "m"));
    assert!(matches!(store.get("m"), State::Missing(_)));
    assert!(store.held().is_empty());
}
