//! The settings of a create request, and the sandbox that they describe.
//!
//! What is wrong with them is a text for the client, which names keys as the documentation of the API does.

use std::collections::BTreeMap;

use model::injection::spec::InjectionItem;
use model::sandbox::{EnvVars, LifecycleSpec, NetworkSpec, SandboxSpec};
use protocol::agent;
use store::builds::BuildRow;
use store::templates::TemplateRow;

use super::repositories::RequestedRepository;

/// The settings of a sandbox that a client asks for.
pub(crate) struct SandboxSettings {
    /// Metadata, by which lists can be filtered.
    pub(crate) metadata: BTreeMap<String, String>,
    /// Environment variables of its processes, which may be secrets.
    pub(crate) env_vars: BTreeMap<String, String>,
    /// Whether its agent requires its token; none if the client did not say.
    pub(crate) secure: Option<bool>,
    /// Whether the client asked for an agent that requires no token, even where such a request has no other effect.
    pub(crate) wants_open_agent: bool,
    /// `false` closes everything that the network settings do not open.
    pub(crate) allow_internet_access: Option<bool>,
    /// How it is reached, and what it may reach.
    pub(crate) network: Option<NetworkSpec>,
    /// Whether it is paused at its deadline, and not killed.
    pub(crate) auto_pause: bool,
    /// Whether its processes are kept then.
    pub(crate) auto_pause_memory: bool,
    /// Whether traffic resumes it while it is paused.
    pub(crate) auto_resume: bool,
    /// Headers that are set on its HTTPS requests.
    pub(crate) injections: Vec<InjectionItem>,
    /// Repositories that it gets before the request is answered.
    pub(crate) repositories: Vec<RequestedRepository>,
}

impl SandboxSettings {
    /// The sandbox to create of a template and its build. `template_name` is the one of the request; the seconds are those
    /// until the first deadline and until the last.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    pub(super) fn spec(
        self,
        template: TemplateRow,
        build: BuildRow,
        template_name: &str,
        timeout_s: u32,
        max_lifetime_s: u32,
    ) -> Result<SandboxSpec, String> {
        let secure = self.secure.unwrap_or_else(|| self.is_private());
        let refusal = self.refusal();
        let env_vars = EnvVars::new(self.env_vars)
            .ok_or("envVars: a name must not be empty or contain '=', and neither name nor value may contain a NUL")?;
        if let Some(why) = refusal {
            return Err(why.to_owned());
        }
        Ok(SandboxSpec {
            template: template.id,
            build: build.id,
            alias: shown_alias(template.aliases, template_name),
            cpu_count: build.cpu_count,
            memory_mb: build.memory_mb,
            disk_mb: build.disk_mb,
            agent_version: build.agent_version.unwrap_or_else(|| agent::VERSION.to_owned()),
            timeout_s,
            max_lifetime_s,
            metadata: self.metadata,
            env_vars,
            secure,
            allow_internet_access: self.allow_internet_access,
            network: self.network,
            lifecycle: LifecycleSpec {
                auto_pause: self.auto_pause,
                auto_pause_discards: !self.auto_pause_memory,
                auto_resume: self.auto_resume,
                paused_for_files: false,
                timeout_s,
            },
        })
    }

    /// Whether its ports require a token.
    fn is_private(&self) -> bool {
        let network = self.network.as_ref();
        network.is_some_and(|network| !network.allow_public_traffic)
    }

    /// The first reason why settings exclude each other.
    fn refusal(&self) -> Option<&'static str> {
        if self.wants_open_agent && self.is_private() {
            // A client of the agent reaches every port through it. Clients compare this text.
            return Some(
                "You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag.",
            );
        }
        match (self.auto_pause_memory, self.auto_pause, self.auto_resume) {
            (false, false, _) => Some("autoPauseMemory: false requires autoPause: true"),
            (false, true, true) => Some("autoPauseMemory: false excludes autoResume"),
            (false, true, false) | (true, _, _) => None,
        }
    }
}

/// The alias to return: the requested one, else the first.
fn shown_alias(aliases: Vec<String>, requested: &str) -> Option<String> {
    if aliases.iter().any(|alias| alias == requested) {
        return Some(requested.to_owned());
    }
    aliases.into_iter().next()
}
