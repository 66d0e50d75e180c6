//! Row 26: a minute of made-up inputs for every fuzz target, but for `rules`, which has the whole gateway compiled anew.

use std::process::Command;

use super::Lab;
use crate::Result;
use crate::board::Board;

/// Runs `fuzz/run`.
pub fn smoke(lab: &Lab, board: &mut Board) -> Result {
    let root = kvgate_tests::root();
    let out =
        Command::new(root.join("fuzz/run")).arg(lab.scaled(60).to_string()).current_dir(&root).output()?;
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    eprint!("{said}{}", String::from_utf8_lossy(&out.stderr));
    let sources = std::fs::read_dir(root.join("fuzz/src/bin"))?.flatten();
    let targets = sources.filter(|source| source.file_name() != "rules.rs").count();
    let good = said.lines().filter(|line| line.ends_with("no failure") && !line.contains(": 0 kept")).count();
    let kept: f64 = said.lines().filter_map(|line| line.split(' ').nth(1)?.parse::<f64>().ok()).sum();
    board.exactly(
        &format!("fuzz targets that ran {} s without a failure, after their kept inputs", lab.scaled(60)),
        good as f64,
        targets as f64,
    );
    board.exactly("fuzz targets that failed", f64::from(u8::from(!out.status.success())), 0.0);
    board.least("inputs kept and run first", kept, "", 100.0);
    Ok(())
}
