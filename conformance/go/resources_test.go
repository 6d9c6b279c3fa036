package conformance

import (
	"errors"
	"os"
	"testing"

	"github.com/qiniu/go-sdk/v7/sandbox"
)

// withRepositories has resources of the code host, which has the repository octocat/go.
func withRepositories(token string, repositories map[string]string) func(*sandbox.CreateParams) {
	return func(params *sandbox.CreateParams) {
		resources := []sandbox.SandboxResourceSpec{}
		for path, url := range repositories {
			resources = append(resources, sandbox.SandboxResourceSpec{GitRepository: &sandbox.GitRepositoryResource{
				Type:               sandbox.GitRepositoryTypeGithub,
				URL:                url,
				MountPath:          path,
				AuthorizationToken: &token,
			}})
		}
		params.Resources = &resources
	}
}

func TestRepositoriesAreWorkingTrees(t *testing.T) {
	box := sandboxFor(t, withRepositories(os.Getenv("RINGFENCE_CODE_HOST_TOKEN"), map[string]string{
		"/home/user/one": "https://github.com/octocat/go.git",
		"/work/two":      "git@github.com:octocat/go.git",
	}))
	same(t, outcome(t, box, "cat /home/user/one/README.md /work/two/README.md").Stdout, "# octocat/go\n# octocat/go\n")
	commit := "cd /work/two && git -c user.name=b -c user.email=b@example.com commit -q --allow-empty -m second"
	outcome(t, box, commit+" && git push -q origin main")
	same(t, outcome(t, box, "cd /home/user/one && git pull -q && git log -1 --format=%s").Stdout, "second\n")
	// Another token reaches the sandbox while it runs.
	must(t, box.UpdateGitHubToken(within(t), "wrong"))
	refused := "cd /work/two && GIT_TERMINAL_PROMPT=0 git ls-remote -q >/dev/null 2>&1 && echo accepted || echo refused"
	same(t, outcome(t, box, refused).Stdout, "refused\n")
	must(t, box.UpdateGitHubToken(within(t), os.Getenv("RINGFENCE_CODE_HOST_TOKEN")))
	same(t, outcome(t, box, refused).Stdout, "accepted\n")
}

func TestRepositoriesThatCannotBeCloned(t *testing.T) {
	for url, token := range map[string]string{
		"https://github.com/octocat/go":   "wrong",
		"https://github.com/octocat/none": os.Getenv("RINGFENCE_CODE_HOST_TOKEN"),
		"https://gitlab.example.com/a/b":  os.Getenv("RINGFENCE_CODE_HOST_TOKEN"),
	} {
		timeout := int32(120)
		params := sandbox.CreateParams{TemplateID: "base", Timeout: &timeout}
		withRepositories(token, map[string]string{"/w": url})(&params)
		_, err := client.Create(within(t), params)
		var failed *sandbox.APIError
		if !errors.As(err, &failed) || failed.StatusCode != 400 {
			t.Fatalf("%s: %v", url, err)
		}
	}
}
