//! A gateway with one more tier.

mod canary;
#[cfg(test)]
mod tests;

use std::process::ExitCode;

fn main() -> ExitCode {
    kvgate::Gateway::new().tier(&canary::KIND).main()
}
