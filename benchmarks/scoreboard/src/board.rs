//! Lines of the board: printed as they come, and as the table of docs/reliability.md.

use std::fmt::Write;
use std::path::Path;

use crate::Result;

/// How the names begin of what is looked at after every row.
const INVARIANT: &str = "invariant: ";

/// A figure beside its target.
#[derive(Clone, Debug)]
pub struct Line {
    /// Of the list.
    pub row: u32,
    /// What was measured.
    pub name: String,
    /// As measured.
    pub value: f64,
    /// Of the value; empty for counts.
    pub unit: &'static str,
    /// In words: `<= 3`.
    pub target: String,
    /// Whether it is met.
    pub pass: bool,
}

/// All lines so far.
#[derive(Default)]
pub struct Board {
    /// In the order of measuring.
    pub lines: Vec<Line>,
    row: u32,
}

impl Board {
    /// What follows belongs to this row.
    pub fn begin(&mut self, row: u32) {
        self.row = row;
    }

    fn add(&mut self, name: &str, value: f64, unit: &'static str, target: String, pass: bool) {
        let line = Line { row: self.row, name: name.into(), value, unit, target, pass };
        println!("{}", line.text());
        self.lines.push(line);
    }

    /// At most so much.
    pub fn most(&mut self, name: &str, value: f64, unit: &'static str, most: f64) {
        self.add(name, value, unit, format!("<= {}", short(most)), value <= most);
    }

    /// Exactly so much.
    pub fn exactly(&mut self, name: &str, value: f64, wanted: f64) {
        self.add(name, value, "", format!("= {}", short(wanted)), (value - wanted).abs() < f64::EPSILON);
    }

    /// At least so much.
    pub fn least(&mut self, name: &str, value: f64, unit: &'static str, least: f64) {
        self.add(name, value, unit, format!(">= {}", short(least)), value >= least);
    }

    /// Within these.
    pub fn within(&mut self, name: &str, value: f64, unit: &'static str, from: f64, to: f64) {
        let target = format!("{} to {}", short(from), short(to));
        self.add(name, value, unit, target, (from..=to).contains(&value));
    }

    /// What could not be measured to the end.
    pub fn broken(&mut self, why: &str) {
        self.add(&format!("could not be measured: {why}"), 1.0, "", "= 0".into(), false);
    }

    /// Lines that miss their target.
    pub fn failed(&self) -> usize {
        self.lines.iter().filter(|line| !line.pass).count()
    }

    /// The lines by row; what is looked at after each is one line there.
    fn table(&self) -> Vec<Line> {
        const AFTER: &str = "invariants: panics, things held, outcomes amiss";
        let mut lines: Vec<Line> = Vec::new();
        for line in &self.lines {
            if !line.name.starts_with(INVARIANT) {
                lines.push(line.clone());
                continue;
            }
            match lines.iter_mut().find(|l| l.row == line.row && l.name == AFTER) {
                Some(one) => {
                    one.value += line.value.abs();
                    one.pass &= line.pass;
                }
                None => lines.push(Line { name: AFTER.into(), value: line.value.abs(), ..line.clone() }),
            }
        }
        lines.sort_by_key(|line| (line.row, line.name == AFTER));
        lines
    }

    /// Puts the table, and where and when it was measured, into the page at its marks; the text around stays.
    ///
    /// # Errors
    /// The page is not there, or has no marks.
    pub fn write(&self, page: &Path, measured: &str) -> Result {
        const BEGIN: &str = "<!-- measured: begin -->\n";
        const END: &str = "<!-- measured: end -->";
        let text = std::fs::read_to_string(page)?;
        let (before, rest) = text.split_once(BEGIN).ok_or("the page has no mark where the table begins")?;
        let (_, after) = rest.split_once(END).ok_or("the page has no mark where the table ends")?;
        let mut table = format!(
            "{measured}\n\n| row | name | value | unit | target | pass |\n|---|---|---|---|---|---|\n"
        );
        for line in self.table() {
            let Line { row, name, unit, target, .. } = line;
            let (value, pass) = (short(line.value), if line.pass { "yes" } else { "**no**" });
            writeln!(table, "| {row} | {name} | {value} | {unit} | {target} | {pass} |")?;
        }
        std::fs::write(page, format!("{before}{BEGIN}{table}{END}{after}"))?;
        Ok(())
    }
}

impl Line {
    /// `row name value unit target pass`, tabs between.
    fn text(&self) -> String {
        let pass = if self.pass { "pass" } else { "FAIL" };
        format!("{}\t{}\t{}\t{}\t{}\t{pass}", self.row, self.name, short(self.value), self.unit, self.target)
    }
}

/// As many digits as say something.
fn short(value: f64) -> String {
    if value.fract() == 0.0 {
        format!("{value:.0}")
    } else if value.abs() < 10.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.1}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_replaces_what_stood_between_the_marks() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("page.md");
        std::fs::write(&page, "above\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nbelow\n")
            .unwrap();
        let mut board = Board::default();
        board.begin(2);
        board.most("later", 4.0, "ms", 3.0);
        board.begin(1);
        board.exactly("invariant: panics", 0.0, 0.0);
        board.exactly("invariant: held", -2.0, 0.0);
        board.exactly("lost", 0.0, 0.0);
        board.write(&page, "today").unwrap();
        let text = std::fs::read_to_string(&page).unwrap();
        assert!(
            text.starts_with("above\n") && text.ends_with("\nbelow\n") && !text.contains("old"),
            "{text}"
        );
        let (first, second) = (
            text.find("| 1 | lost | 0 |  | = 0 | yes |"),
            text.find("| 2 | later | 4 | ms | <= 3 | **no** |"),
        );
        assert!(first.is_some() && first < second, "{text}");
        let after = "| 1 | invariants: panics, things held, outcomes amiss | 2 |  | = 0 | **no** |";
        assert!(text.find(after) > first, "{text}");
        assert_eq!(board.failed(), 2);
    }
}
