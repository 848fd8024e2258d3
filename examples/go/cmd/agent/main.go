// Agent leases the tasks of a run from a gateway, answers each with the policy, and rewards the answer itself.
//
//	bin/agent 127.0.0.1:50070
//
// It is for the tasks of recipes/agents_external.toml: products of two numbers. It ends when the run has no more tasks.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "fourfold/agent/v1"
	"fourfold/client"
)

const (
	workers = 32 // tasks at a time: an engine samples many turns in little more time than one
	wait    = 10 * time.Second
)

var number = regexp.MustCompile(`-?\d+`)

type agent struct {
	service agentv1.AgentServiceClient

	mutex    sync.Mutex
	played   int
	rewarded float64
}

// reward returns 1 if the last number of the text is the answer, else 0.
func reward(text, answer string) float64 {
	found := number.FindAllString(text, -1)
	if len(found) > 0 && found[len(found)-1] == strings.TrimSpace(answer) {
		return 1
	}
	return 0
}

// call makes an idempotent call, and repeats it while the gateway is overloaded or unavailable.
func call(limit time.Duration, attempt func(context.Context) error) error {
	return client.Retrying(func() error { return client.Within(limit, attempt) }, client.Always)
}

// turn samples one turn and returns its text. The request id makes a repetition safe: the gateway returns the stored turn.
func (a *agent) turn(sessionID string, task *agentv1.Task) (string, error) {
	request := &agentv1.GenerateRequest{SessionId: sessionID, RequestId: client.RandomID()}
	if messages := task.GetMessages(); len(messages) > 0 {
		request.Prompt = &agentv1.GenerateRequest_Chat{Chat: &agentv1.Chat{Messages: messages}}
	} else {
		request.Prompt = &agentv1.GenerateRequest_Text{Text: task.GetText()}
	}
	var text strings.Builder
	err := call(2*time.Minute, func(ctx context.Context) error {
		text.Reset()
		stream, err := a.service.Generate(ctx, request)
		for err == nil {
			var response *agentv1.GenerateResponse
			if response, err = stream.Recv(); err == nil {
				for _, chunk := range response.GetChunks() {
					text.WriteString(chunk.GetText())
				}
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	})
	return text.String(), err
}

// play attempts one task in a session of its own.
func (a *agent) play(task *agentv1.Task) error {
	sessionID := client.RandomID()
	open := &agentv1.OpenSessionRequest{
		SessionId: sessionID, Attempt: &agentv1.OpenSessionRequest_TaskId{TaskId: task.GetTaskId()},
	}
	err := call(10*time.Second, func(ctx context.Context) error {
		_, err := a.service.OpenSession(ctx, open)
		return err
	})
	if err != nil {
		return err
	}
	end := &agentv1.CloseSessionRequest{SessionId: sessionID}
	text, failure := a.turn(sessionID, task)
	score := reward(text, task.GetAnswer())
	if failure == nil {
		end.Outcome = &agentv1.CloseSessionRequest_Reward{Reward: score}
	} else {
		end.Outcome = &agentv1.CloseSessionRequest_AbandonReason{AbandonReason: "AGENT_FAILED"}
	}
	// Idempotent: the same outcome again gets the same response.
	err = call(30*time.Second, func(ctx context.Context) error {
		_, err := a.service.CloseSession(ctx, end)
		return err
	})
	if failure != nil {
		return failure
	}
	if err != nil {
		return err
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.played++
	a.rewarded += score
	return nil
}

// work plays tasks until the run has no more: NextTask then fails with FAILED_PRECONDITION.
func (a *agent) work() error {
	for {
		var next *agentv1.NextTaskResponse
		// Not idempotent, but safe to repeat: the lease of a task whose response was lost ends by itself.
		err := call(wait+5*time.Second, func(ctx context.Context) (err error) {
			next, err = a.service.NextTask(ctx, &agentv1.NextTaskRequest{Wait: durationpb.New(wait)})
			return err
		})
		if status.Code(err) == codes.FailedPrecondition {
			return nil
		}
		if err != nil {
			return err
		}
		if task := next.GetTask(); task != nil {
			// The session expired, or the run took the task back. Other tasks go on.
			if err := a.play(task); err != nil {
				fmt.Fprintf(os.Stderr, "task %s: %s\n", task.GetTaskId(), err)
			}
		}
	}
}

func run(target string) error {
	connection, err := client.Dial(target, "gateway")
	if err != nil {
		return err
	}
	defer connection.Close()
	a := &agent{service: agentv1.NewAgentServiceClient(connection)}
	var info *agentv1.GetInfoResponse
	err = call(10*time.Second, func(ctx context.Context) (err error) {
		info, err = a.service.GetInfo(ctx, &agentv1.GetInfoRequest{})
		return err
	})
	if err == nil {
		err = client.CheckContract(info.GetContractVersion())
	}
	if err != nil {
		return err
	}
	name := info.GetRunName()
	if name == "" {
		name = "(none)"
	}
	fmt.Printf("model %s, run %s\n", info.GetModel(), name)

	failures := make(chan error, workers)
	for i := 0; i < workers; i++ {
		go func() { failures <- a.work() }()
	}
	for i := 0; i < workers; i++ {
		if failure := <-failures; failure != nil {
			err = failure
		}
	}
	if err == nil {
		fmt.Printf("%d tasks, mean reward %.3f\n", a.played, a.rewarded/math.Max(float64(a.played), 1))
	}
	return err
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: agent HOST:PORT")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintf(os.Stderr, "agent: %s\n", err)
		os.Exit(1)
	}
}
