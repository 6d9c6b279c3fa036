//! Running a build.
//!
//! Each step that changes files runs in a sandbox of its own, on the layers of the steps before, and what it wrote is
//! committed as the next layer. The key of a layer says everything that its content depends on, so that a step which was
//! run before costs a query. A build that was interrupted is run again from its beginning, where the steps that were
//! finished are in the cache.
//!
//! Archives and images are opened inside sandboxes only, by programs of this binary (`protocol::image`).

mod command;
mod dockerfile;
mod expand;
mod machine;
mod packages;
mod progress;
mod start;
mod state;
mod step;

use self::progress::Progressing;
use self::state::{State, USER};
use self::step::Instruction;
use super::context::BuildContext;
use super::recipe::{BuildFailure, BuildResult, BuildSpec, Job, Logins, Recipe, Source, StartCommand};

/// Runs a build to its end. To cancel it, the future is dropped.
pub(crate) async fn run(context: &BuildContext, job: &Job) -> Result<BuildResult, BuildFailure> {
    let recipe = &job.recipe;
    let mut steps = Vec::with_capacity(recipe.steps.len());
    for (index, step) in recipe.steps.iter().enumerate() {
        let checked = Instruction::parse(step);
        steps.push(checked.map_err(|why| BuildFailure::at((index + 1).to_string(), why))?);
    }
    let mut progressing = Progressing::begin(context, job).await?;
    let mut from_file = None;
    if let Source::Dockerfile(file) = &recipe.source {
        from_file = dockerfile::run(&mut progressing, file).await?;
    } else {
        progressing.load(&recipe.source, &Logins::new()).await?;
        if recipe.steps_as_root {
            progressing.become_user("root");
        }
    }
    for (index, instruction) in steps.iter().enumerate() {
        progressing.step(index + 1, &recipe.steps, instruction).await?;
    }
    let layer_bytes = progressing.layer_bytes().await;
    let Progressing { state, .. } = progressing;
    let start = start_command(recipe, &state, from_file);
    if let Some(start) = &start {
        start::check(context, job, state.image(), start).await?;
    }
    Ok(BuildResult {
        spec: BuildSpec {
            image: state.image(),
            user: if recipe.steps_as_root {
                Some(USER.to_owned())
            } else {
                Some(state.user)
            },
            workdir: if recipe.steps_as_root { None } else { state.workdir },
            env: state.env,
            start,
            memory: None,
            layer_bytes,
        },
        disk_mb: job.disk_mb,
    })
}

/// How long the command of a Dockerfile is given to start, unless the recipe has a ready command.
const DOCKERFILE_READY: &str = "sleep 20";

/// The start and ready commands: those of the recipe, or the command of its Dockerfile, and of its source if it has none.
fn start_command(recipe: &Recipe, state: &State, from_file: Option<String>) -> Option<StartCommand> {
    let given = |command: &Option<String>| command.clone().filter(|text| !text.trim().is_empty());
    let (mut command, mut ready) = (given(&recipe.start_cmd), given(&recipe.ready_cmd));
    if let (None, Some(from_file)) = (&command, from_file) {
        command = Some(from_file);
        ready = ready.or_else(|| Some(DOCKERFILE_READY.to_owned()));
    }
    if command.is_none() && ready.is_none() {
        return match &recipe.source {
            Source::Template { spec, .. } => spec.start.clone(),
            Source::Base | Source::Image { .. } | Source::Archive { .. } | Source::Scratch | Source::Dockerfile(_) => {
                None
            }
        };
    }
    Some(StartCommand {
        command,
        ready,
        user: state.user.clone(),
        workdir: state.workdir.clone(),
        env: state.envs(),
    })
}
