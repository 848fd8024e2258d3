// Certificates that `fourfold certs` makes: ours, those of the servers that we call, and those of our callers.
import { readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import * as grpc from "@grpc/grpc-js";

import { Refusal } from "./service.js";

const PRINCIPAL = "URI:spiffe://fourfold/svc/"; // ROLE/MEMBER follows
const COORDINATOR = /^coordinator\/[a-z0-9-]{1,63}$/;

/** The files of one member. They are read once: restart the service after `fourfold certs renew`. */
export class Security {
  private readonly authority: Buffer;
  private readonly own: Buffer; // certificate and private key
  private readonly revokedFile: string;

  constructor(folder: string, member: string) {
    const file = join(folder, `${member}.pem`);
    if (statSync(file).mode & 0o077) throw new Error(`${file} can be read by others; run: chmod 600 ${file}`);
    this.authority = readFileSync(join(folder, "ca.pem"));
    this.own = readFileSync(file);
    this.revokedFile = join(folder, "revoked.txt");
  }

  /** Credentials of our port: a caller needs a certificate of the same CA. */
  server(): grpc.ServerCredentials {
    return grpc.ServerCredentials.createSsl(this.authority, [{ private_key: this.own, cert_chain: this.own }], true);
  }

  /** Credentials and options of a channel to the coordinator. Its certificate has its role, not the name of its host. */
  coordinator(): [grpc.ChannelCredentials, grpc.ChannelOptions] {
    const credentials = grpc.credentials.createSsl(this.authority, this.own, this.own);
    return [credentials, { "grpc.ssl_target_name_override": "coordinator.fourfold" }];
  }

  /** Throw a Refusal unless the caller is a coordinator whose certificate was not revoked. */
  authorize(call: grpc.ServerUnaryCall<unknown, unknown>): void {
    const certificate = call.getAuthContext().sslPeerCertificate;
    const names = (certificate?.subjectaltname ?? "").split(", ").filter((name) => name.startsWith(PRINCIPAL));
    const principal = names.length === 1 ? names[0]!.slice(PRINCIPAL.length) : "";
    if (!certificate || !principal) {
      throw new Refusal(grpc.status.UNAUTHENTICATED, "UNAUTHENTICATED", "use a certificate that `fourfold certs` made");
    }
    if (!COORDINATOR.test(principal)) {
      throw new Refusal(grpc.status.PERMISSION_DENIED, "PERMISSION_DENIED", "only a coordinator may call this service");
    }
    const fingerprint = certificate.fingerprint256.replaceAll(":", "").toLowerCase();
    if (this.revoked().includes(fingerprint)) {
      throw new Refusal(grpc.status.PERMISSION_DENIED, "CERTIFICATE_REVOKED", `the certificate of ${principal} is revoked`);
    }
  }

  /** The lines of `fourfold certs revoke`, which may appear at any time: FINGERPRINT ROLE/MEMBER EXPIRY. */
  private revoked(): string {
    try {
      return readFileSync(this.revokedFile, "utf8");
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === "ENOENT") return ""; // no certificate was revoked
      throw error;
    }
  }
}
