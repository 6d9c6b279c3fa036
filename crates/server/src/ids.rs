//! New ids, made of random bytes of the kernel.

use getrandom::Error;
use model::id::{SandboxId, TemplateId};

/// The id of a new sandbox.
///
/// # Errors
/// When the kernel provides no random bytes.
pub(crate) fn new_sandbox_id() -> Result<SandboxId, Error> {
    Ok(SandboxId::from_random(&random()?))
}

/// The id of a new template.
///
/// # Errors
/// When the kernel provides no random bytes.
pub(crate) fn new_template_id() -> Result<TemplateId, Error> {
    Ok(TemplateId::from_random(&random()?))
}

fn random() -> Result<[u8; 20], Error> {
    let mut bytes = [0; 20];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}
