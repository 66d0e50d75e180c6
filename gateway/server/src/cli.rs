//! The command line.

use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use kvgate_core::TierKind;

use crate::console::{print, tell};
use crate::explain::{Asked, Explained, Explainer};
use crate::{config, logging, run};

/// The gateway in front of LLM inference fleets.
#[derive(Debug, Parser)]
#[command(name = "kvgate", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves.
    Run {
        #[command(flatten)]
        config: ConfigArg,
        /// Takes over the listeners of the process that serves, which must be sent SIGQUIT.
        ///
        /// They meet at `server.upgrade_socket`; whichever comes first waits for the other. The new process begins to
        /// serve when it knows what engines hold; the old one then serves what is under way, and ends.
        #[arg(long)]
        upgrade: bool,
    },
    /// Checks the configuration and binds nothing.
    Check {
        #[command(flatten)]
        config: ConfigArg,
        /// Treats warnings as errors.
        #[arg(long)]
        strict: bool,
        /// Prints every key, its value and where that comes from: file and line, environment, or default.
        #[arg(long)]
        effective: bool,
        /// Prints the result as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Lists the tiers, their keys and their misses.
    Tiers {
        /// As JSON.
        #[arg(long)]
        json: bool,
        /// As the page of the documentation.
        #[arg(long, conflicts_with = "json")]
        markdown: bool,
    },
    /// Lists every key of the configuration.
    Schema {
        /// As JSON.
        #[arg(long)]
        json: bool,
        /// As the page of the documentation.
        #[arg(long, conflicts_with = "json")]
        markdown: bool,
    },
    /// Shows what the gateway makes of a request: prompt, tokens, block hashes.
    Explain(ExplainArgs),
    /// Shows what KV-aware routing is worth, on simulated engines.
    Demo(crate::demo::DemoArgs),
    /// Shows what routing policies would have made of a trace of requests.
    Replay(crate::replay::ReplayArgs),
    /// Runs one simulated engine.
    Sim(Box<crate::demo::SimArgs>),
}

#[derive(Debug, Args)]
struct ConfigArg {
    /// The configuration.
    #[arg(long, value_name = "FILE", default_value = "conf/gateway.toml")]
    config: PathBuf,
}

#[derive(Debug, Args)]
struct ExplainArgs {
    #[command(flatten)]
    config: ConfigArg,
    /// The rule; may be left out if there is only one.
    #[arg(long)]
    rule: Option<String>,
    /// The request's path; the lines of a batch have their own.
    #[arg(long, default_value = "/v1/chat/completions", conflicts_with = "batch")]
    path: String,
    #[command(flatten)]
    requests: Requests,
    /// As JSON; a batch always is.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Requests {
    /// A file that holds the request's body; `-` is standard input.
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// A file of JSON lines `{path, headers?, body}`; prints a JSON line for each.
    ///
    /// A body is the JSON itself, or a string that holds it raw. `-` is standard input.
    #[arg(long, value_name = "FILE")]
    batch: Option<PathBuf>,
}

/// Runs the command that the process was started with.
pub fn main(kinds: &[TierKind]) -> ExitCode {
    // usage errors leave with 2, help and version with 0
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Run { config, upgrade } => serve(&config, upgrade, kinds),
        Command::Check { config, strict, effective, json } => {
            check(&config, Checked { strict, effective, json }, kinds)
        }
        Command::Tiers { json, markdown } => {
            let tiers = config::tiers(kinds);
            listing(json, markdown, tiers.as_slice(), config::tiers_markdown, config::tiers_text)
        }
        Command::Schema { json, markdown } => {
            let schema = config::schema(kinds);
            listing(json, markdown, &schema, config::Schema::markdown, config::Schema::text)
        }
        Command::Explain(args) => explain(&args, kinds),
        Command::Demo(args) => crate::demo::demo(&args),
        Command::Replay(args) => crate::replay::replay(&args, kinds),
        Command::Sim(args) => crate::demo::sim(&args),
    };
    logging::flush();
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(problem) => {
            tell(&format!("kvgate: {problem}"));
            ExitCode::from(1)
        }
    }
}

/// Whether the answer is yes, or why there is none.
type Done = Result<bool, String>;

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

fn listing<T: serde::Serialize + ?Sized>(
    json: bool,
    markdown: bool,
    listed: &T,
    page: fn(&T) -> String,
    text: fn(&T) -> String,
) -> Done {
    print(&match (json, markdown) {
        (true, _) => to_json(&listed),
        (_, true) => page(listed),
        _ => text(listed),
    })?;
    Ok(true)
}

fn load(arg: &ConfigArg, kinds: &[TierKind]) -> Result<config::Config, String> {
    config::load(&arg.config, kinds).map_err(|found| found.to_string())
}

fn serve(arg: &ConfigArg, upgrade: bool, kinds: &[TierKind]) -> Done {
    let mut process = run::Process::new(&arg.config)?;
    let mut config = load(arg, kinds)?;
    logging::start(&config.gateway.log);
    if upgrade {
        process.inherit(&config.gateway)?;
        // it may have waited for long
        config = load(arg, kinds)?;
    }
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let running = run::start(&arg.config, config, kinds, Some(process))?;
    // not held: a plan lives no longer than it is in force
    for listener in &running.world.plan.load().gateway.listeners {
        tracing::info!(listener = listener.name, address = %listener.address, "listening");
    }
    tracing::info!(admin = %running.world.plan.load().gateway.admin.address, "metrics and health");
    running.wait();
    Ok(true)
}

/// What `check` is asked.
struct Checked {
    strict: bool,
    effective: bool,
    json: bool,
}

fn check(arg: &ConfigArg, asked: Checked, kinds: &[TierKind]) -> Done {
    let mut report = config::check(&arg.config, kinds, asked.strict);
    if asked.effective {
        report.effective = config::Effective::read(&arg.config, kinds);
    }
    if asked.json {
        print(&to_json(&report))?;
    } else {
        if let Some(effective) = &report.effective {
            print(&effective.text())?;
        }
        tell(&report.render(std::io::stderr().is_terminal()));
    }
    Ok(report.ok)
}

fn explain(args: &ExplainArgs, kinds: &[TierKind]) -> Done {
    let config = load(&args.config, kinds)?;
    let explainer = Explainer::new(&config, args.rule.as_deref())?;
    if let Some(file) = &args.requests.batch {
        let name = file.display().to_string();
        let mut readable = true;
        for line in explainer.batch(&name, open(file)?) {
            let (explained, problem) = line.map_err(|e| format!("{name}: {e}"))?;
            if let Some(problem) = problem {
                readable = false;
                tell(&format!("kvgate: {problem}"));
            }
            if !print(&serde_json::to_string(&explained).unwrap_or_default())? {
                break;
            }
        }
        return Ok(readable);
    }
    if let Some(file) = &args.requests.body {
        let mut body = Vec::new();
        open(file)?.read_to_end(&mut body).map_err(|e| format!("{}: {e}", file.display()))?;
        let explained = explainer.explain(&Asked { path: &args.path, model: None, body: &body });
        print(&if args.json {
            serde_json::to_string(&explained).unwrap_or_default()
        } else {
            shown(&explained)
        })?;
    }
    Ok(true)
}

/// A file, or standard input for `-`.
fn open(file: &Path) -> Result<Box<dyn BufRead>, String> {
    if file.as_os_str() == "-" {
        return Ok(Box::new(BufReader::new(std::io::stdin())));
    }
    let file = std::fs::File::open(file).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(Box::new(BufReader::new(file)))
}

/// For people: a key a line.
fn shown(explained: &Explained) -> String {
    let value = serde_json::to_value(explained).unwrap_or_default();
    let mut text = String::new();
    for (key, value) in value.as_object().into_iter().flatten() {
        let value = match value {
            serde_json::Value::Null => "-".to_owned(),
            serde_json::Value::String(text) => text.replace('\n', "\n              "),
            other => other.to_string(),
        };
        text.push_str(&format!("{key:<13} {value}\n"));
    }
    text
}
