//! Row 26: a minute of made-up inputs for every fuzz target.

use std::process::Command;

use super::Lab;
use crate::Result;
use crate::board::Board;

/// Runs `fuzz/run`; what is not built yet is built before the time begins.
pub fn smoke(lab: &Lab, board: &mut Board) -> Result {
    let root = kvgate_tests::root();
    let run = |what: &str| Command::new(root.join("fuzz/run")).arg(what).current_dir(&root).output();
    let built = run("build")?;
    if !built.status.success() {
        return Err(format!("the targets do not build: {}", String::from_utf8_lossy(&built.stderr)).into());
    }
    let out = run(&lab.scaled(60).to_string())?;
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    eprint!("{said}{}", String::from_utf8_lossy(&out.stderr));
    let targets = std::fs::read_dir(root.join("fuzz/src/bin"))?.flatten().count();
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
