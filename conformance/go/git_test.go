package conformance

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/qiniu/go-sdk/v7/sandbox"
)

const gitServer = "https://localhost:8418"

// gitBox is a sandbox with a repository `work` of one commit.
func gitBox(t *testing.T) (*sandbox.Sandbox, *sandbox.Git) {
	t.Helper()
	box := sandboxFor(t)
	git := box.Git()
	did(t)(git.ConfigureUser(within(t), "Ann", "ann@example.com", nil))
	did(t)(git.Init(within(t), "work", &sandbox.InitOptions{InitialBranch: "main"}))
	change(t, box, "work", "a.txt", "one")
	return box, git
}

// did takes the result of a helper that must succeed.
func did(t *testing.T) func(*sandbox.CommandResult, error) {
	return func(_ *sandbox.CommandResult, err error) {
		t.Helper()
		must(t, err)
	}
}

// change commits a file with some content.
func change(t *testing.T, box *sandbox.Sandbox, repository, name, content string) {
	t.Helper()
	_, err := box.Files().Write(within(t), "/home/user/"+repository+"/"+name, []byte(content))
	must(t, err)
	did(t)(box.Git().Add(within(t), repository, nil))
	did(t)(box.Git().Commit(within(t), repository, name+": "+content, nil))
}

func gitStatus(t *testing.T, git *sandbox.Git) *sandbox.GitStatus {
	t.Helper()
	status, err := git.Status(within(t), "work", nil)
	must(t, err)
	return status
}

func TestGitStatusAndCommits(t *testing.T) {
	box, git := gitBox(t)
	ctx := within(t)
	same(t, gitStatus(t, git).IsClean(), true)
	outcome(t, box, "cd work && echo two > a.txt && echo b > b && echo c > c")
	some := false
	did(t)(git.Add(ctx, "work", &sandbox.AddOptions{Files: []string{"b"}, All: &some}))
	status := gitStatus(t, git)
	same(t, fmt.Sprint(status.HasChanges(), status.HasStaged(), status.HasUntracked(), status.HasConflicts()), "true true true false")
	counts := []int{status.TotalCount(), status.StagedCount(), status.UnstagedCount(), status.UntrackedCount(), status.ConflictCount()}
	same(t, fmt.Sprint(counts), "[3 1 1 1 0]")
	did(t)(git.Commit(ctx, "work", "by Bob", &sandbox.CommitOptions{
		AuthorName: "Bob", AuthorEmail: "bob@example.com", AllowEmpty: true,
		GitOptions: sandbox.GitOptions{Envs: map[string]string{"GIT_COMMITTER_NAME": "Eve"}, User: "user", Cwd: "/home/user"},
	}))
	same(t, outcome(t, box, "git -C work log -1 --format='%an %cn %s'").Stdout, "Bob Eve by Bob\n")
}

func TestGitBranches(t *testing.T) {
	box, git := gitBox(t)
	ctx := within(t)
	did(t)(git.CreateBranch(ctx, "work", "side", nil))
	change(t, box, "work", "b.txt", "aside")
	did(t)(git.CheckoutBranch(ctx, "work", "main", nil))
	branches, err := git.Branches(ctx, "work", nil)
	must(t, err)
	sort.Strings(branches.Branches)
	same(t, strings.Join(branches.Branches, " "), "main side")
	same(t, branches.CurrentBranch, "main")
	_, err = git.DeleteBranch(ctx, "work", "side", nil)
	if err == nil || !strings.Contains(err.Error(), "not fully merged") {
		t.Fatal(err)
	}
	did(t)(git.DeleteBranch(ctx, "work", "side", &sandbox.DeleteBranchOptions{Force: true}))
}

func TestGitResetAndRestore(t *testing.T) {
	box, git := gitBox(t)
	ctx := within(t)
	change(t, box, "work", "a.txt", "two")
	did(t)(git.Reset(ctx, "work", &sandbox.ResetOptions{Mode: "soft", Target: "HEAD~1"}))
	same(t, gitStatus(t, git).StagedCount(), 1)
	yes := true
	did(t)(git.Restore(ctx, "work", &sandbox.RestoreOptions{Paths: []string{"a.txt"}, Staged: &yes}))
	same(t, gitStatus(t, git).StagedCount(), 0)
	did(t)(git.Restore(ctx, "work", &sandbox.RestoreOptions{Paths: []string{"a.txt"}}))
	same(t, outcome(t, box, "cat work/a.txt").Stdout, "one")
}

func TestGitConfiguration(t *testing.T) {
	_, git := gitBox(t)
	ctx := within(t)
	local := &sandbox.ConfigOptions{Scope: "local", Path: "work"}
	did(t)(git.SetConfig(ctx, "pull.rebase", "true", local))
	value, err := git.GetConfig(ctx, "pull.rebase", local)
	must(t, err)
	same(t, value, "true")
	value, err = git.GetConfig(ctx, "user.email", nil)
	must(t, err)
	same(t, value, "ann@example.com")
	_, err = git.ConfigureUser(ctx, "", "", nil)
	var invalid *sandbox.InvalidArgumentError
	same(t, errors.As(err, &invalid), true)
	same(t, invalid.Error() != "", true)
}

func TestGitRemotes(t *testing.T) {
	box, git := gitBox(t)
	ctx := within(t)
	did(t)(git.Init(ctx, "far.git", &sandbox.InitOptions{Bare: true, InitialBranch: "main"}))
	did(t)(git.RemoteAdd(ctx, "work", "origin", "/nowhere", nil))
	did(t)(git.RemoteAdd(ctx, "work", "origin", "/home/user/far.git", &sandbox.RemoteAddOptions{Fetch: true, Overwrite: true}))
	url, err := git.RemoteGet(ctx, "work", "origin", nil)
	must(t, err)
	same(t, url, "/home/user/far.git")
	_, err = git.Pull(ctx, "work", nil)
	var upstream *sandbox.GitUpstreamError
	same(t, errors.As(err, &upstream), true)
	same(t, strings.Contains(upstream.Error(), "upstream"), true)
	no := false
	_, err = git.Push(ctx, "work", &sandbox.PushOptions{SetUpstream: &no})
	same(t, errors.As(err, &upstream) && upstream.Unwrap() != nil, true)
	did(t)(git.Push(ctx, "work", &sandbox.PushOptions{Remote: "origin", Branch: "main"}))
	did(t)(git.Clone(ctx, "file:///home/user/far.git", &sandbox.CloneOptions{Path: "copy", Branch: "main", Depth: 1}))
	change(t, box, "copy", "a.txt", "two")
	did(t)(git.Push(ctx, "copy", nil))
	did(t)(git.Pull(ctx, "work", nil))
	same(t, outcome(t, box, "cat work/a.txt").Stdout, "two")
}

func TestAGitServerThatWantsAPassword(t *testing.T) {
	box, git := gitBox(t)
	ctx := within(t)
	source, err := os.ReadFile("../programs/git_server.py")
	must(t, err)
	_, err = box.Files().Write(ctx, "/home/user/git_server.py", source)
	must(t, err)
	outcome(t, box, "mkdir srv && git init -q --bare srv/far.git && git -C srv/far.git config http.receivepack true")
	_, err = box.Files().Write(ctx, "/home/user/server.pem", selfSigned(t))
	must(t, err)
	did(t)(git.SetConfig(ctx, "http.sslCAInfo", "/home/user/server.pem", nil))
	_, err = box.Commands().Start(ctx, "exec python3 git_server.py 8418 srv ann s3cret server.pem")
	must(t, err)
	until(t, "the git server listens", func() bool {
		return strings.Contains(outcome(t, box, "ss -ltnH").Stdout, ":8418 ")
	})
	url := gitServer + "/far.git"
	did(t)(git.RemoteAdd(ctx, "work", "origin", url, nil))
	_, err = git.Push(ctx, "work", &sandbox.PushOptions{Remote: "origin", Branch: "main"})
	var refused *sandbox.GitAuthError
	same(t, errors.As(err, &refused), true)
	same(t, refused.Error() != "" && refused.Unwrap() != nil, true)
	did(t)(git.Push(ctx, "work", &sandbox.PushOptions{Remote: "origin", Branch: "main", Username: "ann", Password: "s3cret"}))
	did(t)(git.Clone(ctx, url, &sandbox.CloneOptions{Path: "copy", Branch: "main", Username: "ann", Password: "s3cret"}))
	kept, err := git.RemoteGet(ctx, "copy", "origin", nil)
	must(t, err)
	same(t, kept, url)
	_, err = git.Pull(ctx, "copy", nil)
	same(t, errors.As(err, &refused), true)
	did(t)(git.DangerouslyAuthenticate(ctx, &sandbox.AuthenticateOptions{
		Username: "ann", Password: "s3cret", Host: "localhost:8418", Protocol: "https",
	}))
	did(t)(git.Pull(ctx, "copy", nil))
}

// selfSigned is a certificate for localhost, with its key: the SDK sends passwords over HTTPS alone.
func selfSigned(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	must(t, err)
	return append(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})...)
}
