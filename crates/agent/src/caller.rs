//! The user for whom a request is carried out, and what a path in it means to that user.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use protocol::connect::{Code, Error};

use crate::paths::{self, ForeignHome};
use crate::settings::AgentSettings;
use crate::users::{User, Users};

/// The user whom a request acts for: that of the Basic header, if there was one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller {
    pub(crate) user: Option<User>,
}

/// The users of the sandbox, and which of them requests without a user act as.
pub(crate) struct Accounts {
    pub(crate) users: Users,
    settings: Rc<RefCell<AgentSettings>>,
}

impl Accounts {
    pub(crate) fn new(settings: Rc<RefCell<AgentSettings>>) -> Self {
        Self {
            users: Users::default(),
            settings,
        }
    }

    /// Name of the user that requests act as when they name none.
    pub(crate) fn default_name(&self) -> String {
        self.settings.borrow().default_user.clone()
    }

    /// The user to act as: the caller's, or the default one.
    ///
    /// # Errors
    /// `unauthenticated` when the default user does not exist.
    pub(crate) fn user_of(&self, caller: &Caller) -> Result<User, Error> {
        if let Some(user) = &caller.user {
            return Ok(user.clone());
        }
        let name = self.default_name();
        let unknown = || Error::new(Code::Unauthenticated, format!("invalid default user: '{name}'"));
        self.users.find(&name).ok_or_else(unknown)
    }

    /// The file that a path means to a user.
    ///
    /// # Errors
    /// [`ForeignHome`].
    pub(crate) fn resolve(&self, user: &User, path: &str) -> Result<PathBuf, ForeignHome> {
        paths::resolve(path, user, self.settings.borrow().default_workdir.as_deref())
    }

    /// The file that a path means to a caller.
    ///
    /// # Errors
    /// `unauthenticated` when the default user does not exist; `invalid_argument` for [`ForeignHome`].
    pub(crate) fn path_of(&self, caller: &Caller, path: &str) -> Result<PathBuf, Error> {
        Ok(self.resolve(&self.user_of(caller)?, path)?)
    }
}

impl From<ForeignHome> for Error {
    fn from(error: ForeignHome) -> Self {
        Self::new(Code::InvalidArgument, error.to_string())
    }
}
