//! Row 26: a minute of made-up inputs for every fuzz target.

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
    let good = said.lines().filter(|line| line.ends_with("no failure")).count();
    let kept: f64 = said.lines().filter_map(|line| line.split(' ').nth(1)?.parse::<f64>().ok()).sum();
    board.least(
        &format!("fuzz targets that ran {} s without a failure", lab.scaled(60)),
        good as f64,
        "",
        4.0,
    );
    board.exactly("fuzz targets that failed", f64::from(u8::from(!out.status.success())), 0.0);
    board.least("inputs kept and run first", kept, "", 100.0);
    Ok(())
}
