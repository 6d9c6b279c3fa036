//! Teams, users and keys: the rows of the first start, and the commands `team`, `key` and `token`.
//!
//! Each step of the first start is idempotent, so an interrupted start is completed by the next one.
//! New keys go into the credentials file before they go into the database: a crash in between leaves a key that the
//! next start registers, never a registered key that is unknown to the operator.

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use model::id::{TeamId, UserId};
use model::limits::{NAME_MAX, is_name};
use serde::Serialize;
use server::keys::NewKey;
use store::Store;
use store::error::StoreError;
use store::keys::{AccessKeyRow, ApiKeyRow, SealedSecret};
use store::teams::{TeamRow, UserRow};
use store::tokens::AccessTokenRow;
use uuid::Uuid;

use crate::args::{DEFAULT, KeyArgs, OfTeam};
use crate::clock::now_us;
use crate::credentials::{self, Addresses, Credentials};
use crate::data_dir::{DataDir, MASTER_FILE};
use crate::master_key::MasterKey;
use crate::output::{self, Format};
use crate::secret::{AccessPair, ApiKey};

/// A new UUID in the form that the database stores. Version 7, so that rows made later sort later.
fn new_uuid() -> String {
    Uuid::now_v7().to_string()
}

/// The owner of the created rows.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    /// The team.
    pub(crate) team: TeamRow,
    /// The user that the commands use.
    pub(crate) user: UserRow,
}

/// Returns the account `default/default`, which is created if it does not exist.
///
/// # Errors
/// When the database fails.
pub(crate) async fn default_account(store: &Store) -> Result<Account> {
    let team = match store.team_by_name(DEFAULT).await? {
        Some(team) => team,
        None => match insert_team(store, DEFAULT).await {
            Err(StoreError::Conflict { .. }) => store.team_by_name(DEFAULT).await?.context("look up team `default`")?,
            made => made?,
        },
    };
    let user = default_user(store, &team.id).await?;
    Ok(Account { team, user })
}

async fn insert_team(store: &Store, name: &str) -> Result<TeamRow, StoreError> {
    let team = TeamRow {
        id: TeamId::try_from(new_uuid()).expect("a UUID in its usual form is a team's id"),
        name: name.to_owned(),
        created_us: now_us(),
    };
    store.team_insert(&team).await?;
    Ok(team)
}

/// The user `default` of a team, created if it does not exist: keys belong to users.
async fn default_user(store: &Store, team: &TeamId) -> Result<UserRow> {
    if let Some(user) = store.user_by_name(team, DEFAULT).await? {
        return Ok(user);
    }
    let user = UserRow {
        id: UserId::try_from(new_uuid()).expect("a UUID in its usual form is a user's id"),
        team_id: team.clone(),
        name: DEFAULT.to_owned(),
        created_us: now_us(),
    };
    match store.user_insert(&user).await {
        Ok(()) => Ok(user),
        Err(StoreError::Conflict { .. }) => {
            let user = store.user_by_name(team, DEFAULT).await?;
            user.context("look up user `default`")
        }
        Err(error) => Err(error.into()),
    }
}

async fn insert_api_key(store: &Store, account: &Account, name: &str, key: &ApiKey) -> Result<String, StoreError> {
    let row = ApiKeyRow {
        id: new_uuid(),
        team_id: account.team.id.clone(),
        user_id: account.user.id.clone(),
        name: name.to_owned(),
        mask: key.mask(),
        created_us: now_us(),
        revoked_us: None,
        last_used_us: None,
    };
    store.api_key_insert(&row, key.hash()).await?;
    Ok(row.id)
}

/// Stores a pair. `Ok(false)` when the access key is taken already, which for one of ours means revoked.
async fn insert_pair(
    store: &Store,
    account: &Account,
    master: &MasterKey,
    pair: &AccessPair,
    name: &str,
) -> Result<bool> {
    let row = AccessKeyRow {
        id: pair.access.clone(),
        team_id: account.team.id.clone(),
        user_id: account.user.id.clone(),
        name: name.to_owned(),
        secret_sealed: SealedSecret::new(master.seal(&pair.access, &pair.secret)?),
        created_us: now_us(),
        revoked_us: None,
    };
    match store.access_key_insert(&row).await {
        Ok(()) => Ok(true),
        Err(StoreError::Conflict { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Ensures that the credentials file contains a valid key and key pair, and the addresses of this start.
///
/// # Errors
/// When the database or the file system fails, or the database was sealed with another master key.
pub(crate) async fn ensure_credentials(
    store: &Store,
    dir: &DataDir,
    master: &MasterKey,
    account: &Account,
    addresses: &Addresses,
) -> Result<()> {
    let found = Credentials::read(dir)?;
    let file_missing = found.is_none();
    let found = found.unwrap_or_default();

    let (kept_key, had_key) = match found.api_key {
        Some(key) => (keep_api_key(store, account, key).await?, true),
        None => (None, false),
    };
    let kept_pair = keep_pair(store, account, master, found.pair).await?;

    let new_key = if kept_key.is_none() {
        Some(ApiKey::generate()?)
    } else {
        None
    };
    let new_pair = if kept_pair.is_none() {
        Some(AccessPair::generate()?)
    } else {
        None
    };
    let key = kept_key.as_ref().or(new_key.as_ref());
    let pair = kept_pair.as_ref().or(new_pair.as_ref());
    let (Some(key), Some(pair)) = (key, pair) else {
        bail!("credentials are incomplete");
    };
    credentials::write(dir, key, pair, addresses)?;

    if let Some(key) = &new_key {
        let earlier = store.api_key_list(&account.team.id).await?;
        let id = insert_api_key(store, account, DEFAULT, key).await?;
        let path = dir.path().join(credentials::FILE);
        if had_key {
            tracing::warn!(
                key.id = id,
                "the API key in {} is revoked; created a new one",
                path.display()
            );
        } else if earlier.iter().any(|key| key.revoked_us.is_none()) {
            let what = if file_missing {
                "was missing"
            } else {
                "contained no API key"
            };
            tracing::warn!(
                key.id = id,
                "{} {what}; keys cannot be recovered from the database, so a new API key was created. Earlier keys \
                 remain valid: see `ringfence key list`",
                path.display()
            );
        }
    }
    if let Some(pair) = &new_pair {
        insert_pair(store, account, master, pair, DEFAULT).await?;
    }
    Ok(())
}

/// Returns the key of the file, if it is valid. One that is not in the database is registered: either a start was cut
/// after it had written the file, or the database is a new one and clients have the key already.
async fn keep_api_key(store: &Store, account: &Account, key: ApiKey) -> Result<Option<ApiKey>> {
    if store.api_key_by_hash(key.hash()).await?.is_some() {
        return Ok(Some(key));
    }
    match insert_api_key(store, account, DEFAULT, &key).await {
        Ok(_) => Ok(Some(key)),
        Err(StoreError::Conflict { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The pair of the file if it is valid, else the newest one of the database whose secret can be decrypted.
async fn keep_pair(
    store: &Store,
    account: &Account,
    master: &MasterKey,
    found: Option<AccessPair>,
) -> Result<Option<AccessPair>> {
    if let Some(pair) = found {
        match store.access_key_by_id(&pair.access).await? {
            Some(row) => return open_pair(master, &row).map(Some),
            None if insert_pair(store, account, master, &pair, DEFAULT).await? => return Ok(Some(pair)),
            None => {}
        }
    }
    let rows = store.access_key_list(&account.team.id).await?;
    rows.iter()
        .rev()
        .find(|row| row.revoked_us.is_none() && row.name == DEFAULT && row.user_id == account.user.id)
        .map(|row| open_pair(master, row))
        .transpose()
}

fn open_pair(master: &MasterKey, row: &AccessKeyRow) -> Result<AccessPair> {
    let secret = master.open(&row.id, row.secret_sealed.as_str()).with_context(|| {
        format!(
            "the database was not sealed with {} of this data directory: restore the file, or give up the \
             access key with `ringfence key revoke {}`",
            MASTER_FILE, row.id
        )
    })?;
    Ok(AccessPair {
        access: row.id.clone(),
        secret,
    })
}

fn check_name(what: &str, name: &str) -> Result<()> {
    if !is_name(name) {
        bail!(
            "invalid {what} name: must have 1 to {NAME_MAX} characters, without control characters and without \
             leading or trailing spaces"
        );
    }
    Ok(())
}

fn time(us: i64) -> String {
    Timestamp::from_microsecond(us).map_or_else(|_| us.to_string(), |time| format!("{time:.0}"))
}

/// A team in the output of commands.
#[derive(Serialize)]
struct ShownTeam {
    id: String,
    name: String,
    created_at: String,
}

/// Runs `team create`.
///
/// # Errors
/// When the name is taken or invalid, or the database fails.
pub(crate) async fn create_team(store: &Store, name: &str) -> Result<()> {
    check_name("team", name)?;
    let team = match insert_team(store, name).await {
        Err(StoreError::Conflict { .. }) => bail!("team {name} already exists"),
        made => made?,
    };
    default_user(store, &team.id).await?;
    output::line(team.id.as_str())
}

/// Runs `team list`.
///
/// # Errors
/// When the database fails.
pub(crate) async fn list_teams(store: &Store, format: Format) -> Result<()> {
    let teams: Vec<ShownTeam> = store
        .team_list()
        .await?
        .into_iter()
        .map(|team| ShownTeam {
            id: team.id.into(),
            name: team.name,
            created_at: time(team.created_us),
        })
        .collect();
    output::list(format, teams, &["NAME", "ID", "CREATED"], |team| {
        vec![team.name, team.id, team.created_at]
    })
}

/// An API key in the output of commands, without the key itself.
#[derive(Serialize)]
struct ShownKey {
    id: String,
    team: String,
    name: String,
    kind: &'static str,
    mask: String,
    created_at: String,
    revoked_at: Option<String>,
}

async fn team_named(store: &Store, name: &str) -> Result<TeamRow> {
    let team = store.team_by_name(name).await?;
    team.with_context(|| format!("team {name} does not exist; create it with `ringfence team create {name}`"))
}

async fn account_named(store: &Store, team: &str, user: &str) -> Result<Account> {
    let team = team_named(store, team).await?;
    let found = match user {
        DEFAULT => Some(default_user(store, &team.id).await?),
        user => store.user_by_name(&team.id, user).await?,
    };
    let user = found.with_context(|| {
        format!(
            "user {user} of team {} does not exist; create it with `ringfence user create --team {} {user}`",
            team.name, team.name
        )
    })?;
    Ok(Account { team, user })
}

/// One team, or all.
async fn teams_named(store: &Store, team: Option<&str>) -> Result<Vec<TeamRow>> {
    Ok(match team {
        Some(name) => vec![team_named(store, name).await?],
        None => store.team_list().await?,
    })
}

/// Runs `user create`.
///
/// # Errors
/// When there is no such team, the name is taken or invalid, or the database fails.
pub(crate) async fn create_user(store: &Store, team: &str, name: &str) -> Result<()> {
    check_name("user", name)?;
    let team = team_named(store, team).await?;
    default_user(store, &team.id).await?;
    let user = UserRow {
        id: UserId::try_from(new_uuid()).expect("a UUID in its usual form is a user's id"),
        team_id: team.id,
        name: name.to_owned(),
        created_us: now_us(),
    };
    match store.user_insert(&user).await {
        Err(StoreError::Conflict { .. }) => bail!("user {name} of team {} already exists", team.name),
        inserted => inserted?,
    }
    output::line(user.id.as_str())
}

/// A user in the output of commands.
#[derive(Serialize)]
struct ShownUser {
    id: String,
    team: String,
    name: String,
    created_at: String,
}

/// Runs `user list`: of one team, or of all.
///
/// # Errors
/// When there is no such team, or the database fails.
pub(crate) async fn list_users(store: &Store, of: &OfTeam) -> Result<()> {
    let mut users = Vec::new();
    for team in teams_named(store, of.team.as_deref()).await? {
        users.extend(store.user_list(&team.id).await?.into_iter().map(|user| ShownUser {
            id: user.id.into(),
            team: team.name.clone(),
            name: user.name,
            created_at: time(user.created_us),
        }));
    }
    output::list(of.format, users, &["NAME", "TEAM", "ID", "CREATED"], |user| {
        vec![user.name, user.team, user.id, user.created_at]
    })
}

/// Runs `access-key create`: prints the pair, this once, as lines for a file of environment variables.
///
/// # Errors
/// When there is no such team or user, the name is invalid, or the database fails.
pub(crate) async fn create_access_key(store: &Store, master: &MasterKey, key: &KeyArgs) -> Result<()> {
    check_name("key", &key.name)?;
    let account = account_named(store, &key.team, &key.user).await?;
    let pair = AccessPair::generate()?;
    // A key that the platform could not open would look like a wrong signature.
    master.token_seed(store).await?;
    if !insert_pair(store, &account, master, &pair, &key.name).await? {
        bail!("the access key exists already; try again");
    }
    output::line(&format!("RINGFENCE_ACCESS_KEY={}", pair.access))?;
    output::line(&format!("RINGFENCE_SECRET_KEY={}", pair.secret))
}

/// An access key in the output of commands, without the secret key.
#[derive(Serialize)]
struct ShownAccessKey {
    id: String,
    team: String,
    user: String,
    name: String,
    created_at: String,
    revoked_at: Option<String>,
}

/// The state of a key, which was revoked then, if it was.
fn state(revoked_at: Option<String>) -> String {
    revoked_at.map_or_else(|| "active".to_owned(), |at| format!("revoked {at}"))
}

/// Runs `access-key list`: of one team or all, of one user or all.
///
/// # Errors
/// When there is no such team, or the database fails.
pub(crate) async fn list_access_keys(
    store: &Store,
    team: Option<&str>,
    user: Option<&str>,
    format: Format,
) -> Result<()> {
    let mut keys = Vec::new();
    for team in teams_named(store, team).await? {
        let users = store.user_list(&team.id).await?;
        for key in store.access_key_list(&team.id).await? {
            let owner = users.iter().find(|owner| owner.id == key.user_id);
            let owner = owner.map_or_else(|| key.user_id.to_string(), |owner| owner.name.clone());
            if user.is_some_and(|user| user != owner) {
                continue;
            }
            keys.push(ShownAccessKey {
                id: key.id,
                team: team.name.clone(),
                user: owner,
                name: key.name,
                created_at: time(key.created_us),
                revoked_at: key.revoked_us.map(time),
            });
        }
    }
    let header = ["ACCESS KEY", "TEAM", "USER", "NAME", "CREATED", "STATE"];
    output::list(format, keys, &header, |key| {
        let state = state(key.revoked_at);
        vec![key.id, key.team, key.user, key.name, key.created_at, state]
    })
}

/// Runs `access-key revoke`.
///
/// # Errors
/// When there is no such key, or the database fails.
pub(crate) async fn revoke_access_key(store: &Store, id: &str) -> Result<()> {
    match store.access_key_revoke(id, now_us()).await? {
        Some(row) => output::line(&format!("revoked {}", row.id)),
        None => bail!("access key {id} does not exist; see `ringfence access-key list`"),
    }
}

/// Runs `key create`: prints the key, this once, and nothing else on stdout.
///
/// # Errors
/// When there is no such team, the name is invalid, or the database fails.
pub(crate) async fn create_key(store: &Store, KeyArgs { team, user, name }: &KeyArgs) -> Result<()> {
    check_name("key", name)?;
    let account = account_named(store, team, user).await?;
    let key = ApiKey::generate()?;
    insert_api_key(store, &account, name, &key).await?;
    output::line(key.expose())
}

/// Runs `key list`: of one team, or of all.
///
/// # Errors
/// When there is no such team, or the database fails.
pub(crate) async fn list_keys(store: &Store, of: &OfTeam) -> Result<()> {
    let mut keys = Vec::new();
    for team in teams_named(store, of.team.as_deref()).await? {
        keys.extend(store.api_key_list(&team.id).await?.into_iter().map(|key| ShownKey {
            id: key.id,
            team: team.name.clone(),
            name: key.name,
            kind: "api",
            mask: key.mask.to_string(),
            created_at: time(key.created_us),
            revoked_at: key.revoked_us.map(time),
        }));
        keys.extend(store.access_key_list(&team.id).await?.into_iter().map(|key| ShownKey {
            mask: key.id.clone(),
            id: key.id,
            team: team.name.clone(),
            name: key.name,
            kind: "access",
            created_at: time(key.created_us),
            revoked_at: key.revoked_us.map(time),
        }));
    }
    let header = ["ID", "TEAM", "NAME", "KIND", "KEY", "CREATED", "STATE"];
    output::list(of.format, keys, &header, |key| {
        let (kind, state) = (key.kind.to_owned(), state(key.revoked_at));
        vec![key.id, key.team, key.name, kind, key.mask, key.created_at, state]
    })
}

/// Runs `key revoke`.
///
/// # Errors
/// When there is no such key, or the database fails.
pub(crate) async fn revoke_key(store: &Store, id: &str) -> Result<()> {
    let now = now_us();
    let mask = match store.api_key_revoke(id, now).await? {
        Some(row) => row.mask.to_string(),
        None => match store.access_key_revoke(id, now).await? {
            Some(row) => row.id,
            None => bail!("key {id} does not exist; see `ringfence key list`"),
        },
    };
    output::line(&format!("revoked {mask}"))
}

/// Runs `token create`: prints the token, this once, and nothing else on stdout.
///
/// # Errors
/// When there is no such team, the name is invalid, or the database fails.
pub(crate) async fn create_token(store: &Store, team: &str, name: &str) -> Result<()> {
    check_name("token", name)?;
    let team = team_named(store, team).await?;
    let user = default_user(store, &team.id).await?;
    let token = NewKey::access_token().context("create an access token")?;
    let row = AccessTokenRow {
        id: new_uuid(),
        user_id: user.id,
        name: name.to_owned(),
        mask: token.mask(),
        created_us: now_us(),
        last_used_us: None,
    };
    store.access_token_insert(&row, &token.hash()).await?;
    output::line(&token.expose())
}

/// An access token in the output of commands, without the token itself.
#[derive(Serialize)]
struct ShownToken {
    id: String,
    team: String,
    name: String,
    mask: String,
    created_at: String,
    last_used_at: Option<String>,
}

/// Runs `token list`: of one team, or of all.
///
/// # Errors
/// When there is no such team, or the database fails.
pub(crate) async fn list_tokens(store: &Store, of: &OfTeam) -> Result<()> {
    let mut tokens = Vec::new();
    for team in teams_named(store, of.team.as_deref()).await? {
        let user = default_user(store, &team.id).await?;
        let rows = store.access_token_list(&user.id).await?;
        tokens.extend(rows.into_iter().map(|row| ShownToken {
            id: row.id,
            team: team.name.clone(),
            name: row.name,
            mask: row.mask.to_string(),
            created_at: time(row.created_us),
            last_used_at: row.last_used_us.map(time),
        }));
    }
    let header = ["ID", "TEAM", "NAME", "TOKEN", "CREATED", "LAST USED"];
    output::list(of.format, tokens, &header, |token| {
        let used = token.last_used_at.unwrap_or_else(|| "never".to_owned());
        vec![token.id, token.team, token.name, token.mask, token.created_at, used]
    })
}

/// Runs `token revoke`.
///
/// # Errors
/// When there is no such token, or the database fails.
pub(crate) async fn revoke_token(store: &Store, id: &str) -> Result<()> {
    for team in store.team_list().await? {
        let user = default_user(store, &team.id).await?;
        if store.access_token_delete(&user.id, id).await? {
            return output::line(&format!("revoked {id}"));
        }
    }
    bail!("access token {id} does not exist; see `ringfence token list`")
}

#[cfg(test)]
mod tests;
