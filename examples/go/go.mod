// The protos' go_package puts generated code at fourfold/NAME/v1, so that the example is the module `fourfold`. In your own
// module, keep the generated code in a module of this name beside yours, with a `replace` for it.
module fourfold

go 1.24.0

require (
	google.golang.org/grpc v1.76.0
	google.golang.org/protobuf v1.36.10
)
