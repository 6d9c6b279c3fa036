//! `ringfence`: the whole platform in one binary.
//!
//! The same file is bind-mounted into every sandbox as its agent, so the first argument is looked at before anything
//! else: the agent, its spawner and the launchers of the host start without a command-line parser, a configuration or
//! a thread pool, and an idle one costs next to nothing.
//!
//! Invariant: this crate wires and configures. It is the only one that reads configuration and environment, and it
//! decides nothing about sandboxes.

mod accounts;
mod args;
mod backup;
mod bench;
mod clock;
mod config;
mod connection_threads;
mod credentials;
mod dashboard;
mod data_dir;
mod database;
mod doctor;
mod down;
mod generated;
mod harden;
mod inside;
mod logging;
mod master_key;
mod node_files;
mod node_identity;
mod node_run;
mod nodes;
mod one_thread;
mod operator;
mod output;
mod parts;
mod requests;
mod runtimes;
mod sandboxes;
mod secret;
mod serve;
mod server_order;
mod signals;
mod split;
mod stdio;
mod template;
mod templates;
mod terminal;
mod tls;
mod top;
mod transfer;
mod up;
mod up_with;
mod version;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use crate::args::{
    AccessKeyCommand, Cli, Command, KeyCommand, MasterKeyCommand, TeamCommand, TokenCommand, UserCommand,
};
use crate::config::{Config, ConfigError, LogFormat, Sources};
use crate::data_dir::DataDir;
use crate::database::with_store;
use crate::master_key::MasterKey;

/// Wrong usage or configuration: the operator's to correct, and of no use to try again.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    // No other command begins with these words, and nobody types them: the node and the agent start these processes.
    match std::env::args_os().nth(1).as_deref().and_then(|word| word.to_str()) {
        Some("agent") => agent::run(),
        Some("spawner") => agent::spawner::run(),
        Some("launcher") => runtime::launcher::main(),
        // Programs of a build, inside a sandbox.
        Some(word) if let Some(program) = image::Program::named(word) => {
            image::run(program, std::env::args_os().nth(2).as_deref(), clock::now())
        }
        _ => operator(),
    }
}

/// Everything that a person or a service manager starts.
fn operator() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are answers, not mistakes; clap knows which stream and which exit code fit.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE));
        }
    };
    // They need no configuration, and a broken one must not be in their way.
    if let Some(done) = generated(&cli.command) {
        return done.map_or_else(
            |error| {
                output::error(&error);
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        );
    }
    let sources = Sources {
        flags: cli.flags(),
        config: cli.common.config.clone(),
        env: config::environment(),
    };
    // Neither programs that are started from here nor their users need them.
    runtime::environment::forget(master_key::MASTER_ENV);
    runtime::environment::forget(config::blobs::KEY_ENV);
    runtime::environment::name_user();
    let settings = match sources.resolve() {
        Ok(settings) => Config {
            log_format: cli.log_format(settings.log_format),
            ..settings
        },
        Err(error) => {
            output::error(&error.into());
            return ExitCode::from(USAGE);
        }
    };
    match run(cli.command, &settings, &sources) {
        Ok(code) => code,
        Err(error) => {
            // With JSON logs, the reader of stderr parses it: the last line must be an object too. Other commands than
            // `up` have them only if their flag says so.
            if settings.log_format == LogFormat::Json && tracing::dispatcher::has_been_set() {
                tracing::error!("{error:#}");
            } else {
                output::error(&error);
            }
            match error.downcast_ref::<ConfigError>() {
                Some(_) => ExitCode::from(USAGE),
                None => ExitCode::FAILURE,
            }
        }
    }
}

/// Runs a command that is about the command line itself; none if it is another one.
fn generated(command: &Command) -> Option<Result<()>> {
    match command {
        Command::Completions { shell } => Some(generated::completions(*shell)),
        Command::Manual { directory } => Some(generated::manual(directory)),
        _ => None,
    }
}

fn run(command: Command, settings: &Config, sources: &Sources) -> Result<ExitCode> {
    let default_level = match command {
        Command::Up(_) if logging::is_on_terminal(settings) => logging::LEVEL_ON_TERMINAL,
        Command::Up(_) | Command::Server(_) => "info",
        Command::Node(ref args) if args.command.is_none() => "info",
        _ => "warn",
    };
    logging::start(settings, default_level)?;
    for name in &settings.unknown_env {
        let meant = config::similar_variable(name);
        let meant = meant
            .map(|meant| format!("; did you mean {meant}?"))
            .unwrap_or_default();
        tracing::warn!("unknown environment variable {name}: ignored{meant}");
    }
    match command {
        Command::Up(args) => up::run(settings, &args.with),
        Command::Server(_) => serve::run(settings),
        Command::Node(args) => match &args.command {
            None => node_run::run(settings),
            Some(command) => nodes::run(settings, command),
        },
        Command::Split(command) => split::run(settings, &command),
        Command::Down => down::run(settings),
        Command::Doctor { format, .. } => doctor::run(settings, format),
        Command::Team(command) => with_store(settings, async |store| match command {
            TeamCommand::Create { name } => accounts::create_team(store, &name).await,
            TeamCommand::List { format } => accounts::list_teams(store, format).await,
        }),
        Command::Key(command) => with_store(settings, async |store| match command {
            KeyCommand::Create(key) => accounts::create_key(store, &key).await,
            KeyCommand::List(of) => accounts::list_keys(store, &of).await,
            KeyCommand::Revoke { id } => accounts::revoke_key(store, &id).await,
        }),
        Command::User(command) => with_store(settings, async |store| match command {
            UserCommand::Create { name, team } => accounts::create_user(store, &team, &name).await,
            UserCommand::List(of) => accounts::list_users(store, &of).await,
        }),
        Command::AccessKey(command) => with_store(settings, async |store| match command {
            AccessKeyCommand::Create(key) => {
                let master = MasterKey::of(&DataDir::prepare(&settings.data_dir)?, &settings.master_key)?;
                accounts::create_access_key(store, &master, &key).await
            }
            AccessKeyCommand::List { team, user, format } => {
                accounts::list_access_keys(store, team.as_deref(), user.as_deref(), format).await
            }
            AccessKeyCommand::Revoke { id } => accounts::revoke_access_key(store, &id).await,
        }),
        Command::Token(command) => with_store(settings, async |store| match command {
            TokenCommand::Create { team, name } => accounts::create_token(store, &team, &name).await,
            TokenCommand::List(of) => accounts::list_tokens(store, &of).await,
            TokenCommand::Revoke { id } => accounts::revoke_token(store, &id).await,
        }),
        Command::MasterKey(command) => {
            let dir = DataDir::prepare(&settings.data_dir)?;
            // A server that runs has the key before, and would seal with it.
            let _lock = dir.lock()?;
            let source = &settings.master_key;
            with_store(settings, async |store| match command {
                MasterKeyCommand::Rotate { to } => master_key::rotate(store, &dir, source, to.as_deref()).await,
                MasterKeyCommand::Forget => master_key::forget(store, &dir, source).await,
            })
        }
        Command::Sandbox(command) => sandboxes::run(settings, &command),
        Command::Dashboard => dashboard::run(settings),
        Command::Top(args) => top::run(settings, &args),
        Command::Template(command) => template::run(settings, sources, command),
        Command::Gc { dry_run, cache, format } => transfer::collect(settings, dry_run, cache, format),
        Command::Backup(command) => backup::run(settings, sources, &command),
        Command::Bench(args) => bench::run(&args, settings, sources),
        // Answered before any configuration was read.
        Command::Completions { .. } | Command::Manual { .. } => Ok(ExitCode::SUCCESS),
    }
}
