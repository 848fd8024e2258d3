// Sample prints the tokens of one completion as a rollout service samples them.
//
//	bin/sample 127.0.0.1:50060 1,2,3
//
// The second argument is the prompt as token ids: the rollout service has no text. See AgentService for messages.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"fourfold/client"
	rolloutv1 "fourfold/rollout/v1"
)

type sampled struct {
	tokens  int
	logprob float64
	reason  rolloutv1.FinishReason
}

// stream samples one completion and adds its tokens to the result as they come.
func (result *sampled) stream(ctx context.Context, service rolloutv1.RolloutServiceClient, prompt []int32) error {
	stream, err := service.Generate(ctx, &rolloutv1.GenerateRequest{
		RequestId:      client.RandomID(), // one live request has one id: an attempt gets a new one
		PromptTokenIds: prompt,
		SamplingParams: &rolloutv1.SamplingParams{
			Temperature: proto.Float32(1), MaxTokens: proto.Int32(16), Seed: proto.Int64(7),
		},
		// Without it, a sample comes once, when it is finished.
		FlushInterval: durationpb.New(50 * time.Millisecond),
	})
	for err == nil {
		var response *rolloutv1.GenerateResponse
		if response, err = stream.Recv(); err != nil {
			break
		}
		for _, chunk := range response.GetChunks() {
			ids := client.Int32s(chunk.GetTokenIds())
			result.tokens += len(ids)
			for _, value := range client.Float32s(chunk.GetLogprobs()) {
				result.logprob += float64(value)
			}
			result.reason = chunk.GetFinishReason()
			fmt.Printf("version %d: %s\n", chunk.GetPolicyVersion(), strings.Trim(fmt.Sprint(ids), "[]"))
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func run(target string, prompt []int32) error {
	connection, err := client.Dial(target, "rollout")
	if err != nil {
		return err
	}
	defer connection.Close()
	service := rolloutv1.NewRolloutServiceClient(connection)

	var info *rolloutv1.GetInfoResponse
	err = client.Retrying(func() error {
		return client.Within(10*time.Second, func(ctx context.Context) (err error) {
			info, err = service.GetInfo(ctx, &rolloutv1.GetInfoRequest{})
			return err
		})
	}, client.Always)
	if err == nil {
		err = client.CheckContract(info.GetContractVersion())
	}
	if err != nil {
		return err
	}
	fmt.Printf("model %s, policy version %d\n", info.GetModel(), info.GetPolicyVersion())

	var result sampled
	err = client.Retrying(func() error {
		return client.Within(time.Minute, func(ctx context.Context) error { return result.stream(ctx, service, prompt) })
	}, func() bool { return result.tokens == 0 }) // after the first token, a repeated call would sample another completion
	if err == nil {
		fmt.Printf("%d tokens, log-probability %.3f, %s\n", result.tokens, result.logprob, result.reason)
	}
	return err
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: sample HOST:PORT TOKEN_ID,TOKEN_ID,...")
		os.Exit(2)
	}
	var prompt []int32
	for _, word := range strings.Split(os.Args[2], ",") {
		id, err := strconv.ParseInt(word, 10, 32)
		if err != nil {
			fmt.Fprintf(os.Stderr, "sample: %q is no token id\n", word)
			os.Exit(2)
		}
		prompt = append(prompt, int32(id))
	}
	if err := run(os.Args[1], prompt); err != nil {
		reason, _ := client.Details(err)
		fmt.Fprintf(os.Stderr, "sample: %s: %s\n", reason, status.Convert(err).Message())
		os.Exit(1)
	}
}
