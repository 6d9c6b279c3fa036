//! The repositories of a create request.

use model::repository::{MountPath, RepositoryUrl};
use model::secret::Secret;

use crate::repositories::{Repository, RepositoryRequest};
use crate::sandboxes::repositories::code_hosts;

/// A repository that a client asks for.
#[derive(Debug)]
pub(crate) struct RequestedRepository {
    pub(crate) url: RepositoryUrl,
    /// Where its working tree stands.
    pub(crate) mount_path: MountPath,
    /// The token with which it is fetched.
    pub(crate) token: Secret,
}

/// The repositories of a request, if it has any.
///
/// # Errors
/// With what is wrong, for the client.
pub(super) fn accepted(asked: &[RequestedRepository]) -> Result<Option<RepositoryRequest>, String> {
    let Some(first) = asked.first() else {
        return Ok(None);
    };
    let hosts = code_hosts();
    let host = hosts.first().map(String::as_str).unwrap_or_default();
    let mut repositories: Vec<Repository> = Vec::new();
    for (index, one) in asked.iter().enumerate() {
        let refused = |why: String| Err(format!("resources[{index}].{why}"));
        if one.url.host != host {
            return refused(format!("url: only repositories of {host} are supported"));
        }
        if one.token != first.token {
            let why = "authorization_token: all repositories of a sandbox must have the same authorization_token";
            return refused(why.to_owned());
        }
        let other = repositories
            .iter()
            .position(|other| other.mount_path.overlaps(&one.mount_path));
        if let Some(other) = other {
            return refused(format!(
                "mount_path: the same as that of resources[{other}], or one is inside the other"
            ));
        }
        repositories.push(Repository {
            url: one.url.clone(),
            mount_path: one.mount_path.clone(),
        });
    }
    Ok(Some(RepositoryRequest {
        repositories,
        token: first.token.clone(),
    }))
}
