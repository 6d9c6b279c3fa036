package conformance

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/qiniu/go-sdk/v7/sandbox"
)

func TestOutputAndExitCodes(t *testing.T) {
	box := sandboxFor(t)
	result := outcome(t, box, "echo out; echo err >&2; exit 3")
	same(t, *result, sandbox.CommandResult{ExitCode: 3, Stdout: "out\n", Stderr: "err\n", Error: "exit status 3"})
	same(t, *outcome(t, box, "true"), sandbox.CommandResult{})
	same(t, outcome(t, box, "no-such-program").ExitCode, 127)
	ended := outcome(t, box, "kill -KILL $$")
	same(t, *ended, sandbox.CommandResult{ExitCode: -1, Error: "signal: killed"})
	large := outcome(t, box, "seq 1 500000").Stdout
	same(t, len(large), 3_388_895)
	same(t, strings.HasSuffix(large, "\n499999\n500000\n"), true)
}

func TestEnvironmentDirectoryAndUser(t *testing.T) {
	box := sandboxFor(t)
	same(t, outcome(t, box, "pwd; whoami").Stdout, "/home/user\nuser\n")
	same(t, outcome(t, box, "pwd; whoami", sandbox.WithCommandUser("root")).Stdout, "/root\nroot\n")
	same(t, outcome(t, box, "pwd", sandbox.WithCwd("/usr/bin")).Stdout, "/usr/bin\n")
	envs := map[string]string{"A": "it's \"quoted\" $HOME é"}
	same(t, outcome(t, box, `echo "$A"`, sandbox.WithEnvs(envs)).Stdout, envs["A"]+"\n")
	result := outcome(t, box, "pwd", sandbox.WithCwd("/no/such/dir"))
	same(t, result.ExitCode, -1)
	same(t, strings.Contains(result.Error, "invalid_argument: cwd '/no/such/dir' does not exist"), true)
	result = outcome(t, box, "pwd", sandbox.WithCommandUser("nobody-here"))
	same(t, strings.Contains(result.Error, "unauthenticated"), true)
}

func TestInputCallbacksAndTheList(t *testing.T) {
	ctx := within(t)
	box := sandboxFor(t)
	var out, err2 collected
	handle, err := box.Commands().Start(ctx, "echo ready; echo problem >&2; cat",
		sandbox.WithStdin(), sandbox.WithTag("mine"), sandbox.WithOnStdout(out.add), sandbox.WithOnStderr(err2.add))
	must(t, err)
	pid, err := handle.WaitPID(ctx)
	must(t, err)
	until(t, "the first lines are heard", func() bool { return out.text() == "ready\n" && err2.text() == "problem\n" })

	listed, err := box.Commands().List(ctx)
	must(t, err)
	same(t, len(listed), 1)
	same(t, listed[0].PID, pid)
	same(t, *listed[0].Tag, "mine")
	same(t, fmt.Sprint(listed[0].Cmd, listed[0].Args), "/bin/bash[-l -c echo ready; echo problem >&2; cat]")

	must(t, box.Commands().SendStdin(ctx, pid, []byte("more é\n")))
	must(t, box.Commands().CloseStdin(ctx, pid))
	result, err := handle.Wait()
	must(t, err)
	same(t, *result, sandbox.CommandResult{Stdout: "ready\nmore é\n", Stderr: "problem\n"})

	deaf, err := box.Commands().Start(ctx, "exec sleep 60")
	must(t, err)
	pid, err = deaf.WaitPID(ctx)
	must(t, err)
	err = box.Commands().SendStdin(ctx, pid, []byte("x"))
	if err == nil || !strings.Contains(err.Error(), "stdin not enabled") {
		t.Fatal(err)
	}
	must(t, deaf.Kill(ctx))
	result, err = deaf.Wait()
	must(t, err)
	same(t, *result, sandbox.CommandResult{ExitCode: -1, Error: "signal: killed"})
	err = box.Commands().Kill(ctx, 999999)
	if err == nil || !strings.Contains(err.Error(), "not_found") {
		t.Fatal(err)
	}
}

func TestASecondListener(t *testing.T) {
	ctx := within(t)
	box := sandboxFor(t)
	first, err := box.Commands().Start(ctx, "read line; echo \"$line\"; exit 4", sandbox.WithStdin())
	must(t, err)
	pid, err := first.WaitPID(ctx)
	must(t, err)
	second, err := box.Commands().Connect(ctx, pid)
	must(t, err)
	must(t, box.Commands().SendStdin(ctx, pid, []byte("heard\n")))
	result, err := first.Wait()
	must(t, err)
	same(t, *result, sandbox.CommandResult{ExitCode: 4, Stdout: "heard\n", Error: "exit status 4"})
	// The SDK does not say when the second began to listen: it may have missed the line, but not the end.
	result, err = second.Wait()
	must(t, err)
	same(t, result.ExitCode, 4)
	same(t, result.Stdout == "heard\n" || result.Stdout == "", true)
}

func TestATimeLimitEndsTheCommand(t *testing.T) {
	box := sandboxFor(t)
	begun := time.Now()
	result := outcome(t, box, "exec sleep 600", sandbox.WithTimeout(time.Second))
	same(t, result.ExitCode, -1)
	if result.Error == "" || time.Since(begun) > patience(10) {
		t.Fatalf("%+v after %v", result, time.Since(begun))
	}
	until(t, "the process is gone", func() bool {
		listed, err := box.Commands().List(within(t))
		return err == nil && len(listed) == 0
	})
}

func TestFiftyCommandsAtOnce(t *testing.T) {
	box := sandboxFor(t)
	ctx := within(t)
	var all sync.WaitGroup
	for n := range 50 {
		all.Add(1)
		go func() {
			defer all.Done()
			result, err := box.Commands().Run(ctx, fmt.Sprintf("echo %d", n))
			if err != nil || result.Stdout != fmt.Sprintf("%d\n", n) {
				t.Errorf("%d: %+v %v", n, result, err)
			}
		}()
	}
	all.Wait()
}

func TestATerminal(t *testing.T) {
	ctx := within(t)
	box := sandboxFor(t)
	var screen collected
	shows := func(text string) {
		t.Helper()
		until(t, text, func() bool { return strings.Contains(screen.text(), text) })
	}
	handle, err := box.Pty().Create(ctx, sandbox.PtySize{Cols: 80, Rows: 24}, sandbox.WithOnPtyData(screen.add))
	must(t, err)
	pid, err := handle.WaitPID(ctx)
	must(t, err)
	same(t, handle.PID(), pid)
	say := func(line string) {
		t.Helper()
		must(t, box.Pty().SendInput(ctx, pid, []byte(line+"\r")))
	}
	say("echo \"<$TERM-$LANG-$(whoami)>\"; stty size")
	shows("<xterm-C.UTF-8-user>")
	shows("24 80")
	must(t, box.Pty().Resize(ctx, pid, sandbox.PtySize{Cols: 132, Rows: 50}))
	say("stty size")
	shows("50 132")
	second, err := box.Pty().Connect(ctx, pid)
	must(t, err)
	heard, err := second.WaitPID(ctx)
	must(t, err)
	same(t, heard, pid)
	must(t, box.Pty().Kill(ctx, pid))
	result, err := second.Wait()
	must(t, err)
	same(t, result.ExitCode, -1)
	result, err = handle.Wait()
	must(t, err)
	same(t, result.ExitCode, -1)

	handle, err = box.Pty().Create(ctx, sandbox.PtySize{Cols: 80, Rows: 24})
	must(t, err)
	pid, err = handle.WaitPID(ctx)
	must(t, err)
	say("exit 7")
	result, err = handle.Wait()
	must(t, err)
	same(t, result.ExitCode, 7)
}
