// Package client has what every client needs: a connection, the details of an error, retries, and token arrays.
package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// The major version of the contract that this program was written for.
const contractMajor = "1"

const (
	maxAttempts     = 8
	maxMessageBytes = 16 << 20
)

type bearer string

func (token bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(token)}, nil
}

func (bearer) RequireTransportSecurity() bool { return true }

// Dial connects to a service of a role, "rollout" or "gateway": with TLS and a bearer token if FOURFOLD_CA and
// FOURFOLD_TOKEN are set, otherwise in plain text.
func Dial(target, role string) (*grpc.ClientConn, error) {
	options := []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
		grpc.WithDisableRetry(), // the contract's own rules are in Retrying
		grpc.WithNoProxy(),      // services of a run are not behind the proxy that HTTPS_PROXY names
	}
	authority := os.Getenv("FOURFOLD_CA")
	if authority == "" {
		return grpc.Dial(target, append(options, grpc.WithInsecure())...)
	}
	pem, err := os.ReadFile(authority)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no certificate", authority)
	}
	// The certificate names the role of the service, not its machine.
	secure := credentials.NewTLS(&tls.Config{RootCAs: roots, ServerName: role + ".fourfold", MinVersion: tls.VersionTLS12})
	token := grpc.WithPerRPCCredentials(bearer(os.Getenv("FOURFOLD_TOKEN")))
	return grpc.Dial(target, append(options, grpc.WithTransportCredentials(secure), token)...)
}

// Within calls attempt with a deadline; the service refuses a call without one.
func Within(limit time.Duration, attempt func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	if traceparent := os.Getenv("TRACEPARENT"); traceparent != "" { // the call joins this trace (W3C Trace Context)
		ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", traceparent)
	}
	defer cancel() // also ends a stream that was left early, and its samples in the engine
	return attempt(ctx)
}

// Details returns the reason of an error for programs, and the pause that the service asks for; 0: none.
func Details(err error) (string, time.Duration) {
	known := status.Convert(err)
	reason, pause := strings.ToUpper(known.Code().String()), time.Duration(0)
	for _, detail := range known.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.GetReason()
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			pause = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
		}
	}
	return reason, pause
}

// Retrying repeats an attempt while the service is overloaded or unavailable and mayRepeat returns true. Use it only for
// what is safe to repeat: idempotent calls, and a stream before its first response.
func Retrying(attempt func() error, mayRepeat func() bool) error {
	for number := 1; ; number++ {
		err := attempt()
		if err == nil || number == maxAttempts || !mayRepeat() {
			return err
		}
		reason, pause := Details(err)
		code := status.Code(err)
		if code != codes.Unavailable && (code != codes.ResourceExhausted || pause == 0) {
			return err
		}
		if pause == 0 {
			pause = 100 * time.Millisecond << number
			if pause > 5*time.Second {
				pause = 5 * time.Second
			}
		}
		fmt.Fprintf(os.Stderr, "%s; attempt %d in %s\n", reason, number+1, pause)
		time.Sleep(pause + time.Duration(rand.Float64()*float64(pause)/4))
	}
}

// Always is for calls that are idempotent.
func Always() bool { return true }

// CheckContract fails unless the service has our major version of the contract; an older service returns no version.
func CheckContract(version string) error {
	if major, _, _ := strings.Cut(version, "."); version != "" && major != contractMajor {
		return fmt.Errorf("the service has contract %s, this program %s.x: use the protos of its version", version, contractMajor)
	}
	return nil
}

// Int32s reads little-endian int32: token ids.
func Int32s(data []byte) []int32 {
	values := make([]int32, len(data)/4)
	for i := range values {
		values[i] = int32(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return values
}

// Float32s reads little-endian float32: log-probabilities.
func Float32s(data []byte) []float32 {
	values := make([]float32, len(data)/4)
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return values
}

// RandomID returns 32 hexadecimal digits, for the ids that a caller chooses.
func RandomID() string {
	return fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64())
}
