//! The rows and the file of first and later starts, on a database of their own.

use super::*;
use crate::master_key::KeySource;

struct TestPlatform {
    _temp: tempfile::TempDir,
    dir: DataDir,
    master: MasterKey,
    store: Store,
}

impl TestPlatform {
    async fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        let url = format!("sqlite:{}/ringfence.db", dir.path().display());
        Self {
            master: MasterKey::load_or_make(&dir, &KeySource::DataDir).unwrap(),
            store: Store::open(&url).await.unwrap(),
            dir,
            _temp: temp,
        }
    }

    /// Does what a start of the platform does, and returns the credentials that it wrote.
    async fn start(&self, port: u16) -> Result<(String, String, String)> {
        let account = default_account(&self.store).await?;
        let addresses = Addresses::of(([127, 0, 0, 1], port).into(), "d".to_owned());
        ensure_credentials(&self.store, &self.dir, &self.master, &account, &addresses).await?;
        let written = Credentials::read(&self.dir)?.unwrap();
        let (key, pair) = (written.api_key.unwrap(), written.pair.unwrap());
        let owner = self.store.api_key_by_hash(key.hash()).await?.unwrap();
        assert_eq!((owner.team_id, owner.user_id), (account.team.id, account.user.id));
        let row = self.store.access_key_by_id(&pair.access).await?.unwrap();
        assert_eq!(self.master.open(&row.id, row.secret_sealed.as_str())?, pair.secret);
        assert_eq!(written.api_url.unwrap(), format!("http://127.0.0.1:{port}"));
        Ok((key.expose().to_owned(), pair.access, pair.secret))
    }

    async fn keys(&self) -> Vec<ApiKeyRow> {
        let team = self.store.team_by_name(DEFAULT).await.unwrap().unwrap();
        self.store.api_key_list(&team.id).await.unwrap()
    }

    fn remove_credentials(&self) {
        std::fs::remove_file(self.dir.path().join(credentials::FILE)).unwrap();
    }
}

#[tokio::test]
async fn a_second_start_keeps_the_keys() {
    let platform = TestPlatform::new().await;
    let first = platform.start(3000).await.unwrap();
    assert_eq!(platform.start(4000).await.unwrap(), first);
    assert_eq!(platform.keys().await.len(), 1);
    platform.store.close().await;
}

#[tokio::test]
async fn a_lost_file_means_a_new_key_and_the_old_pair() {
    let platform = TestPlatform::new().await;
    let first = platform.start(3000).await.unwrap();
    platform.remove_credentials();
    let second = platform.start(3000).await.unwrap();
    assert_ne!(first.0, second.0);
    assert_eq!((&first.1, &first.2), (&second.1, &second.2));
    assert_eq!(platform.keys().await.len(), 2);
    platform.store.close().await;
}

#[tokio::test]
async fn revoked_credentials_are_replaced() {
    let platform = TestPlatform::new().await;
    let first = platform.start(3000).await.unwrap();
    revoke_key(&platform.store, &platform.keys().await[0].id).await.unwrap();
    revoke_key(&platform.store, &first.1).await.unwrap();
    let second = platform.start(3000).await.unwrap();
    assert_ne!(first.0, second.0);
    assert_ne!(first.1, second.1);
    assert_eq!(platform.start(3000).await.unwrap(), second);
    platform.store.close().await;
}

#[tokio::test]
async fn a_start_cut_before_the_database_is_finished_by_the_next() {
    let platform = TestPlatform::new().await;
    let (key, pair) = (ApiKey::generate().unwrap(), AccessPair::generate().unwrap());
    let addresses = Addresses::of(([127, 0, 0, 1], 1).into(), "d".to_owned());
    credentials::write(&platform.dir, &key, &pair, &addresses).unwrap();
    let started = platform.start(3000).await.unwrap();
    assert_eq!(started, (key.expose().to_owned(), pair.access, pair.secret));
    platform.store.close().await;
}

#[tokio::test]
async fn a_foreign_master_key_is_refused() {
    let mut platform = TestPlatform::new().await;
    let first = platform.start(3000).await.unwrap();
    std::fs::remove_file(platform.dir.path().join(crate::data_dir::MASTER_FILE)).unwrap();
    platform.master = MasterKey::load_or_make(&platform.dir, &KeySource::DataDir).unwrap();
    let refused = format!("{:#}", platform.start(3000).await.unwrap_err());
    assert!(
        refused.contains(&first.1) && refused.contains("secret.key"),
        "{refused}"
    );
    assert!(!refused.contains(&first.2), "{refused}");
    platform.store.close().await;
}
